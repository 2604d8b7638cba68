"""Whole models, optimizers' parameters and Python objects, from one rank to all or from all to all.

Objects travel as cloudpickle through the data plane between the user's own ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
import torch

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.broadcasting import broadcast_, broadcast_async_
from hvdlab.torch.gathering import allgather_async
from hvdlab.torch.handles import synchronize
from hvdlab.torch.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors on all ranks with those of ``root_rank``, in place.

    Args:
        params: A ``state_dict()``, or a list of ``(name, tensor)`` pairs such as ``model.named_parameters()``, or a
            list of tensors (matched in order). Entries that are not tensors are left as they are.
        root_rank: The rank they come from.

    Raises:
        InvalidRequestError: ``params`` is none of these.
        MismatchError, AbortedError: As for ``broadcast``; some tensors may have been overwritten by then.
    """
    handles = [
        broadcast_async_(tensor, root_rank, None if name is None else f"parameter.{name}")
        for name, tensor in _named(params)
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, (torch.Tensor, str)) or not isinstance(params, Iterable):
        raise InvalidRequestError(
            "broadcast_parameters takes a state_dict, model.named_parameters() or a list of tensors, "
            f"not {type(params).__name__}."
        )
    return [entry if isinstance(entry, tuple) else (None, entry) for entry in params]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return ``root_rank``'s object on every rank.

    Args:
        obj: Anything cloudpickle takes; only the root's matters.
        root_rank: The rank it comes from.
        name: Equal on all ranks.
        process_set: Who takes part.

    Returns:
        At the root the very ``obj``, elsewhere a copy.
    """
    label = name or "broadcast_object"
    at_root = context.engine().rank == root_rank
    # Pickled before anything is sent: an object that can't be pickled must not leave the others waiting for long.
    payload = _to_bytes(obj) if at_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([len(payload)]), root_rank, f"{label}.size", process_set)
    if not at_root:
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast_(payload, root_rank, f"{label}.pickle", process_set)
    return obj if at_root else _from_bytes(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the list of all ranks' objects, in the order of the ranks, on every rank.

    Args:
        obj: Anything cloudpickle takes.
        name: Equal on all ranks.
        process_set: Who takes part.
    """
    label = name or "allgather_object"
    handle = allgather_async(_to_bytes(obj), f"{label}.pickle", process_set)
    gathered: torch.Tensor = synchronize(handle)
    sizes = [size for (size,) in handle.tables[0]]
    return [_from_bytes(piece) for piece in torch.split(gathered, sizes)]


def _to_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return cloudpickle.loads(data.numpy().data)


def __getattr__(name: str) -> Any:
    if name != "broadcast_optimizer_state":  # which Horovod has here
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdlab.torch.optimizer_state import broadcast_optimizer_state

    return broadcast_optimizer_state

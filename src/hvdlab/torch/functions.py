"""Broadcasts of whole models' parameters and of Python objects, and the allgather of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdlab.bindings import objects
from hvdlab.bindings.handles import wait_for_all
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.compiling import untraced
from hvdlab.torch.ops import broadcast_async_

broadcast_object = untraced(objects.broadcast_object)
allgather_object = untraced(objects.allgather_object)


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors on all ranks with those of ``root_rank``, in place.

    Args:
        params: A ``state_dict()``, or a list of ``(name, tensor)`` pairs such as ``model.named_parameters()``, or a
            list of tensors (matched in order). Entries that are not tensors are left as they are.
        root_rank: The rank whose tensors all ranks get.

    Raises:
        InvalidRequestError: ``params`` is none of these.
        MismatchError, AbortedError: As for ``broadcast``, once no broadcast is in flight. Some tensors may have been overwritten.
    """
    wait_for_all(
        [
            broadcast_async_(tensor, root_rank, None if name is None else f"parameter.{name}")
            for name, tensor in _named(params)
            if isinstance(tensor, torch.Tensor)
        ]
    )


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, (torch.Tensor, str)) or not isinstance(params, Iterable):
        raise InvalidRequestError(
            "broadcast_parameters takes a state_dict, model.named_parameters() or a list of tensors, "
            f"not {type(params).__name__}."
        )
    return [entry if isinstance(entry, tuple) else (None, entry) for entry in params]


def __getattr__(name: str) -> Any:
    # Horovod has this function in this module. An import at the top would be circular.
    if name != "broadcast_optimizer_state":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdlab.torch.optimizer_state import broadcast_optimizer_state

    return broadcast_optimizer_state

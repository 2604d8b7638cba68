"""Broadcasts of models' parameters, of optimizers' states and of Python objects, and the allgather of objects."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvdlab.bindings import objects
from hvdlab.bindings.handles import wait_for_all
from hvdlab.collectives.context import own_number
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.dynamo import untraced
from hvdlab.torch.mpi_ops import broadcast_async_
from hvdlab.torch.optimizer import nothing_of

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


@dataclass(frozen=True)
class _Slot:
    """Placeholder of a tensor in the plan that the source sends, so that the other ranks can allocate one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    #: Whether it is a DTensor, which is sharded among the ranks as its parameter is.
    divided: bool


class StateTransfer(Protocol):
    """Transfer of an optimizer's state from one rank, the source, to others."""

    def plan(self, plan: Any) -> Any:
        """Return the source's ``plan`` on all ranks; the other ranks pass ``None``."""

    def tensors(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite tensors with the source's; of a ``DTensor``, overwrite this rank's shard."""


class _FromRoot:
    """Transfer of the state from the root to all ranks of the world, by broadcasts."""

    def __init__(self, root_rank: int) -> None:
        self._root = root_rank

    def plan(self, plan: Any) -> Any:
        return broadcast_object(plan, self._root, "optimizer_state")

    def tensors(self, tensors: list[torch.Tensor]) -> None:
        wait_for_all(
            [
                broadcast_async_(tensor, self._root, f"optimizer_state.{number}")
                for number, tensor in enumerate(tensors)
            ]
        )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state (momenta, step counts, ...) and settings (lr, ...) of ``root_rank``.

    Also works when the state of some ranks, or of the root, is still empty, and with any optimizer whose state is
    made of tensors and picklable values. No step is taken. A rank overwrites its own tensors where shape, dtype and device
    fit, allocates the others, and drops state that the root does not have.

    If the root has no state yet, every rank gives a gradient of zeros to its parameters without one, since programs written
    for Horovod count on that. (Gradients that are there stay as they are.)

    Args:
        optimizer: The optimizer, distributed or not. Its parameter groups have the same parameters, in the same order, on all
            ranks.
        root_rank: The rank whose state all ranks get.
        model: Only for embeddings with sparse gradients: the model that has them, so that they get sparse zeros. Not needed
            for ``SparseAdam``.

    Raises:
        InvalidRequestError: The optimizer has another number of groups or parameters than the root's.
        MismatchError, AbortedError: As for ``broadcast``; some tensors of the state may have been overwritten.
        NotInitializedError: ``init()`` was not called.
    """
    root = own_number() == root_rank
    if not transfer_optimizer_state(optimizer, _FromRoot(root_rank), gives=root):
        _make_gradients(_parameters(optimizer), _sparse_parameters(optimizer, model))


def transfer_optimizer_state(
    optimizer: torch.optim.Optimizer, transfer: StateTransfer, *, gives: bool
) -> bool:
    """Give an optimizer the state and settings that the source's has.

    Args:
        optimizer: This rank's optimizer.
        transfer: The way from the source to this rank.
        gives: Whether this rank is the source.

    Returns:
        Whether the source has any state.
    """
    parameters = _parameters(optimizer)
    groups, states = _contents(optimizer, parameters)
    tensors: list[torch.Tensor] = []
    plan = transfer.plan(_planned((groups, states), tensors) if gives else None)
    if not gives:
        groups, states = _prepared(plan, groups, states, optimizer, tensors)
    transfer.tensors(tensors)
    if not gives:
        _install(optimizer, parameters, groups, states)
    return bool(states)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sparse_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None
) -> Container[torch.Tensor]:
    """Return the parameters whose gradients are sparse: all of ``SparseAdam``, and the sparse embeddings of the model."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return {parameter for group in optimizer.param_groups for parameter in group["params"]}
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = () if model is None else model.modules()
    return {module.weight for module in modules if isinstance(module, tables) and module.sparse}


def _make_gradients(parameters: list[torch.Tensor], sparse: Container[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = (
                nothing_of(parameter, 1)
                if parameter in sparse
                else torch.zeros_like(parameter, requires_grad=False)
            )


def _contents(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Return the settings of each group, and the state of each parameter that has any, by the parameter's position."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    states = {number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state}
    return groups, states


def _planned(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy of nested containers with a slot for each tensor in them; these are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        # Source and receivers walk through the containers in one order, so the n-th tensor is the same one on
        # both sides.
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype, value.is_cpu, hasattr(value, "device_mesh"))
    if isinstance(value, dict):
        return {key: _planned(item, tensors) for key, item in value.items()}
    # Not of their subclasses: a named tuple's constructor takes fields, and not one iterable.
    if type(value) in (list, tuple):
        return type(value)(_planned(item, tensors) for item in value)
    return value


def _prepared(
    plan: Any,
    groups: list[dict[str, Any]],
    states: dict[int, Any],
    optimizer: torch.optim.Optimizer,
    tensors: list[torch.Tensor],
) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Return the root's contents with tensors of this rank in the slots; these are appended to ``tensors`` in order."""
    planned_groups, planned_states = plan
    parameters = _parameters(optimizer)
    if len(planned_groups) != len(groups) or any(number >= len(parameters) for number in planned_states):
        raise InvalidRequestError(
            f"The optimizer of the root has {len(planned_groups)} parameter groups and state for "
            f"{len(planned_states)} parameters; the one here has {len(groups)} groups and {len(parameters)} "
            "parameters. They must be made alike on all ranks."
        )
    # A setting that is not in the host's memory, such as the learning rate of a captured step, goes to the group's device.
    firsts = [next(iter(group["params"]), torch.empty(0)) for group in optimizer.param_groups]
    filled_groups = [
        _filled(p, own, first, tensors) for p, own, first in zip(planned_groups, groups, firsts, strict=True)
    ]
    filled_states = {
        number: _filled(planned, states.get(number), parameters[number], tensors)
        for number, planned in planned_states.items()
    }
    return filled_groups, filled_states


def _filled(plan: Any, own: Any, parameter: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    """Return the plan with a tensor for each slot: this rank's tensor in the same place if it fits, otherwise a new one."""
    if isinstance(plan, _Slot):
        if not _fits(plan, own):
            own = (
                torch.empty_like(parameter, dtype=plan.dtype, requires_grad=False)
                if plan.divided
                else torch.empty(
                    plan.shape, dtype=plan.dtype, device="cpu" if plan.on_cpu else parameter.device
                )
            )
        tensors.append(own)
        return own
    if isinstance(plan, dict):
        mine = own if isinstance(own, dict) else {}
        return {key: _filled(item, mine.get(key), parameter, tensors) for key, item in plan.items()}
    if type(plan) in (list, tuple):
        items = own if type(own) is type(plan) and len(own) == len(plan) else [None] * len(plan)
        return type(plan)(_filled(p, o, parameter, tensors) for p, o in zip(plan, items, strict=True))
    return plan


def _fits(slot: _Slot, own: Any) -> bool:
    return (
        isinstance(own, torch.Tensor)
        and tuple(own.shape) == slot.shape
        and own.dtype == slot.dtype
        and own.is_cpu == slot.on_cpu
        and hasattr(own, "device_mesh") == slot.divided
    )


def _install(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    groups: list[dict[str, Any]],
    states: dict[int, Any],
) -> None:
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        # In place, since the plan leaves out the parameters: each rank's own ones stay, and schedulers refer
        # to the dictionary.
        group.update(settings)
    for number, parameter in enumerate(parameters):
        if number in states:
            optimizer.state[parameter] = states[number]
        else:
            optimizer.state.pop(parameter, None)

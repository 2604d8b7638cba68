"""Making an optimizer's state and settings those of another rank."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.numbering import own_number
from hvdlab.torch.functions import broadcast_object
from hvdlab.torch.gradients import nothing_of
from hvdlab.torch.ops import broadcast_async_, synchronize


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in the plan that the root sends: what to make room for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    #: Whether it is a DTensor, which is divided among ranks as its parameter is.
    divided: bool


class StateTransfer(Protocol):
    """Takes an optimizer's state from one rank to others."""

    def plan(self, plan: Any) -> Any:
        """The source's object; elsewhere ``plan`` is ``None``."""

    def tensors(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite tensors with those of the source; of a ``DTensor`` what this rank has of it."""


class _FromRoot:
    """To all ranks of the world."""

    def __init__(self, root_rank: int) -> None:
        self._root = root_rank

    def plan(self, plan: Any) -> Any:
        return broadcast_object(plan, self._root, "optimizer_state")

    def tensors(self, tensors: list[torch.Tensor]) -> None:
        handles = [
            broadcast_async_(tensor, self._root, f"optimizer_state.{number}")
            for number, tensor in enumerate(tensors)
        ]
        for handle in handles:
            synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state (momenta, step counts, ...) and settings (lr, ...) of ``root_rank``.

    Works also when the state of some ranks, or of the root, is still empty, and with any optimizer whose state is
    made of tensors and picklable values. No step is taken. Tensors that fit are overwritten where they are; what the
    root does not have is dropped.

    If the root has no state yet, parameters without a gradient get one of zeros on every rank, since programs written
    for Horovod count on that. (Gradients that are there stay as they are.)

    Args:
        optimizer: The optimizer, or the one that ``DistributedOptimizer`` returned. Its parameter groups have the
            same parameters, in the same order, on all ranks.
        root_rank: The rank the state comes from.
        model: Tells which of the parameters are embeddings with sparse gradients, which then get sparse zeros. Not
            needed otherwise, and not for ``SparseAdam``.
    """
    root = own_number() == root_rank
    if not transfer_optimizer_state(optimizer, _FromRoot(root_rank), gives=root):
        _make_gradients(_parameters(optimizer), _sparse_parameters(optimizer, model))


def transfer_optimizer_state(
    optimizer: torch.optim.Optimizer, transfer: StateTransfer, *, gives: bool
) -> bool:
    """Make state and settings those of another rank.

    Args:
        optimizer: The rank's own.
        transfer: The way there.
        gives: Whether this rank is the source.

    Returns:
        Whether the source has any state.
    """
    parameters = _parameters(optimizer)
    groups, states = _contents(optimizer, parameters)
    tensors: list[torch.Tensor] = []
    plan = transfer.plan(_planned((groups, states), tensors) if gives else None)
    if not gives:
        groups, states = _prepared(plan, groups, states, parameters, tensors)
    transfer.tensors(tensors)
    if not gives:
        _install(optimizer, parameters, groups, states)
    return bool(states)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sparse_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None
) -> Container[torch.Tensor]:
    """Those whose gradients are to be sparse."""
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
    """Settings of each group, and state of each parameter by its position."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    states = {number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state}
    return groups, states


def _planned(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested containers with a slot for each tensor in them; these are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype, value.is_cpu, hasattr(value, "device_mesh"))
    if isinstance(value, dict):
        return {key: _planned(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_planned(item, tensors) for item in value)
    return value


def _prepared(
    plan: Any,
    groups: list[dict[str, Any]],
    states: dict[int, Any],
    parameters: list[torch.Tensor],
    tensors: list[torch.Tensor],
) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """The root's contents with tensors of this rank in the slots; these are appended to ``tensors`` in order."""
    planned_groups, planned_states = plan
    if len(planned_groups) != len(groups) or any(number >= len(parameters) for number in planned_states):
        raise InvalidRequestError(
            f"The optimizer of the root has {len(planned_groups)} parameter groups and state for "
            f"{len(planned_states)} parameters; the one here has {len(groups)} groups and {len(parameters)} "
            "parameters. They must be made alike on all ranks."
        )
    filled_groups = [
        _filled(p, own, torch.empty(0), tensors) for p, own in zip(planned_groups, groups, strict=True)
    ]
    filled_states = {
        number: _filled(planned, states.get(number), parameters[number], tensors)
        for number, planned in planned_states.items()
    }
    return filled_groups, filled_states


def _filled(plan: Any, own: Any, parameter: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    """The plan with tensors for its slots: what this rank has in the same place, if it fits, else a new one."""
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
        group.update(settings)
    for number, parameter in enumerate(parameters):
        if number in states:
            optimizer.state[parameter] = states[number]
        else:
            optimizer.state.pop(parameter, None)

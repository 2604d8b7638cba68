"""Forms in which the methods of a process group can be called.

Torch's C++ and ``torch.distributed`` pass lists of tensors and an object of options. Torch's overloads for users also take a tensor alone, and the
operator, the root and the limit themselves, by position or by keyword: ``group.allreduce(tensor, op=ReduceOp.MAX)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_c10d: Any = dist.distributed_c10d
_ATTRIBUTES = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


class CallForm(NamedTuple):
    """Arguments of one of torch's methods.

    Attributes:
        names: For each argument before the options, the names that torch's overloads give it.
        nesting: For each of them, how many lists lie around its tensors.
        options: The class of the options, and others that count as such.
        extras: The attributes of the options that an overload takes in their place, in its order.
    """

    names: tuple[tuple[str, ...], ...]
    nesting: tuple[int, ...]
    options: tuple[type, ...]
    extras: tuple[str, ...] = ()


_REDUCED = (("tensors", "tensor"),)
_SINGLE = (("output", "output_tensor", "outputTensor"), ("input", "input_tensor", "inputTensor"))
_LISTS = (
    ("output_tensors", "output_tensor", "outputs", "output_lists", "outputTensors", "output"),
    ("input_tensors", "input_tensor", "inputs", "input_list", "inputTensors", "input"),
)
_SPLITS = (*_SINGLE, ("output_split_sizes",), ("input_split_sizes",))
_GATHERED, _SCATTERED, _EXCHANGED = (
    (_c10d.AllgatherOptions,),
    (_c10d.ReduceScatterOptions,),
    (_c10d.AllToAllOptions,),
)

FORMS: dict[str, CallForm] = {
    "allreduce": CallForm(_REDUCED, (1,), (_c10d.AllreduceOptions,), ("op", "timeout")),
    "allreduce_coalesced": CallForm(
        _REDUCED, (1,), (_c10d.AllreduceCoalescedOptions, _c10d.AllreduceOptions)
    ),
    "broadcast": CallForm(_REDUCED, (1,), (_c10d.BroadcastOptions,), ("root", "timeout")),
    "reduce": CallForm(_REDUCED, (1,), (_c10d.ReduceOptions,), ("root", "op", "timeout")),
    "allgather": CallForm(_LISTS, (2, 1), _GATHERED, ("timeout",)),
    "allgather_coalesced": CallForm(_LISTS, (0, 1), _GATHERED),
    **dict.fromkeys(("_allgather_base", "all_gather_single"), CallForm(_SINGLE, (0, 0), _GATHERED)),
    **dict.fromkeys(
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        CallForm(_LISTS, (1, 1), _GATHERED),
    ),
    "reduce_scatter": CallForm(_LISTS, (1, 2), _SCATTERED, ("op", "timeout")),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), CallForm(_SINGLE, (0, 0), _SCATTERED)),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        CallForm(_LISTS, (1, 1), _SCATTERED),
    ),
    "alltoall": CallForm(_LISTS, (1, 1), _EXCHANGED, ("timeout",)),
    **dict.fromkeys(
        ("alltoall_base", "all_to_all_single"), CallForm(_SPLITS, (0, 0, 0, 0), _EXCHANGED, ("timeout",))
    ),
    "gather": CallForm(_LISTS, (2, 1), (_c10d.GatherOptions,), ("root", "timeout")),
    "scatter": CallForm(_LISTS, (1, 2), (_c10d.ScatterOptions,), ("root", "timeout")),
    "barrier": CallForm((), (), (_c10d.BarrierOptions,), ("timeout",)),
}
"""Forms of torch's methods by their names, also by those before torch 2.13."""


def canonical(method: str, args: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments of a call as torch's C++ passes them: the tensors in lists, and the options last.

    Args:
        method: Torch's method.
        args, named: The arguments by position and by keyword.

    Raises:
        TypeError: An argument is missing, or the method has none such.
    """
    form = FORMS[method]
    count = len(form.names)
    if not named and len(args) == count + 1 and isinstance(args[count], form.options):
        return args  # from C++ or torch.distributed, as nearly all calls are
    left, given, rest = dict(named), list(args[:count]), list(args[count:])
    for names in form.names[len(given) :]:
        name = next((each for each in names if each in left), None)
        if name is None:
            raise TypeError(f"{method}() lacks its argument {names[0]!r}.")
        given.append(left.pop(name))
    options = left.pop("opts", None)
    if rest and (rest[0] is None or isinstance(rest[0], form.options)):
        options = rest.pop(0)
    extras = dict(zip(form.extras, rest, strict=False))
    wrong = [*rest[len(form.extras) :], *(each for each in left if each not in form.extras or each in extras)]
    extras.update(left)
    if wrong or (extras and options is not None):
        raise TypeError(f"{method}() takes no such arguments: {wrong or list(extras)}.")
    options = form.options[0]() if options is None else options
    for name, value in extras.items():
        if value is not None:
            setattr(options, _ATTRIBUTES[name], value)
    return (*map(_nested, given, form.nesting), options)


def _nested(argument: Any, depth: int) -> Any:
    """Return a tensor, or a list of tensors, within as many lists as ``depth``; an argument without tensors stays as it is."""
    found, inner = 0, argument
    while isinstance(inner, (list, tuple)) and inner:
        found, inner = found + 1, inner[0]
    if isinstance(inner, torch.Tensor):
        for _ in range(depth - found):
            argument = [argument]
    return argument


def in_all_forms(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that may be called in all forms, for one that takes lists and options."""

    def call(self: Any, *args: Any, **named: Any) -> Any:
        return function(self, *canonical(method, args, named))

    call.__name__ = method
    return call

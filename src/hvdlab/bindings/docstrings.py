"""Docstrings of collectives that stand alone under ``?``: the text that all forms share is written here, once."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_WIDTH = 110
"""Columns of a generated paragraph, as many as the source has."""

_TENSORS = {
    "allreduce": "Equal shape and dtype on every rank; any shape, 0-d and empty ones included.",
    "allgather": (
        "Equal dtype, and equal dimensions but for the first, which may differ between ranks and may be 0. A 0-d "
        "tensor counts as one row."
    ),
    "broadcast": "Equal shape and dtype on every rank; the root's values are what all get.",
    "reducescatter": (
        "Equal shape and dtype on every rank. Its rows (of dimension 0) are divided among the ranks: of ``d`` rows each "
        "of ``n`` ranks gets ``d // n``, the first ``d % n`` one more."
    ),
    "alltoall": "Equal dtype, and equal dimensions but for the first, on every rank.",
}
_OUTPUTS = {
    "allreduce": "A new tensor of the same shape, dtype and device, equal on all ranks.",
    "allgather": "A new tensor with the rows of all ranks, in the order of the ranks.",
    "broadcast": "A new tensor with the values of the root.",
    "reducescatter": "A new tensor with this rank's rows of the result.",
    "alltoall": "A new tensor with the rows that came, in the order of the ranks they came from.",
}
_ARGUMENTS = {
    "average": "Deprecated form of ``op``: true stands for ``Average``, false for ``Sum``.",
    "name": "Equal on all ranks, and not in flight twice. Calls without a name are matched in order.",
    "compression": "Applied to what is sent, and undone on what is received; equal on all ranks.",
    "op": (
        "``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``. The average of integers is "
        "exact and truncated toward zero, and they are scaled in float64; float16 and bfloat16 are accumulated in float32; bool has ``Min`` and ``Max``. Adasum "
        "takes floating-point tensors (its formula is in hvdlab.collectives.reduce), and reducescatter has none."
    ),
    "priority": "Accepted for Horovod's sake: the call waits, so no other overtakes it.",
    "prescale_factor": "Multiplies the inputs.",
    "postscale_factor": "Multiplies the result.",
    "device_dense": "TensorFlow device for dense tensors, such as ``/cpu:0``; by default where the tensors are.",
    "device_sparse": "TensorFlow device for ``tf.IndexedSlices``; by default where they are.",
    "ignore_name_scope": "In a graph: whether the name is to be without TensorFlow's name scope.",
    "process_set": "The ranks that take part; all by default. A rank outside may not call it.",
    "root_rank": "The rank whose values all get: a rank of the world, also within a process set.",
    "splits": (
        "Rows (of dimension 0) for each rank, whose sum is the number of rows: a list, an array or a tensor of integers. "
        "``None`` divides them evenly."
    ),
}
_ASYNC = "A handle for ``synchronize``, which waits and gives the result, and for ``poll``. It keeps the tensors alive."
_UNTIL_DONE = "must not change until the handle is done"
_IN_FLIGHT = "must be neither read nor changed until the handle is done"
_REFUSED = (
    "InvalidRequestError: An argument is wrong, or this rank is not in the process set. Nothing was sent."
)
_NOT_INITIALIZED = "NotInitializedError: ``init()`` was not called."
_FAILED = (
    "MismatchError: The ranks disagree about the collective; raised on all of them. The group can go on.",
    "AbortedError: It can't complete: a rank died, failed, left, was interrupted, ... The group can go on.",
)


def documented(function: F) -> F:
    """Complete the docstring of a public collective from its name and signature.

    The name is Horovod's: ``grouped_`` for lists of tensors, ``_async`` for a handle instead of the result, ``_`` at
    the end for results that are written to the given tensors. The docstring's own text stays in front, but
    for a ``Returns:`` section at its end, which replaces the usual one.
    """
    own = inspect.getdoc(function)
    if own is None:  # python -OO
        return function
    name = function.__name__
    in_place, bare = name.endswith("_"), name.rstrip("_")
    grouped, waits = bare.startswith("grouped_"), not bare.endswith("_async")
    kind = bare.removeprefix("grouped_").removesuffix("_async")
    arguments = [
        _entry(f"{parameter}: {_argument(kind, parameter, waits=waits, in_place=in_place)}")
        for parameter in inspect.signature(function).parameters
    ]
    summary, _, returned = own.partition("\n\nReturns:\n")
    if not returned:
        usual = _output(kind, grouped=grouped, in_place=in_place) if waits else _ASYNC
        returned = _entry(usual, hanging="")
    sections = [summary, "Args:\n" + "\n".join(arguments), "Returns:\n" + returned]
    raised = [_REFUSED, _NOT_INITIALIZED, *(_FAILED if waits else ())]
    sections.append("Raises:\n" + "\n".join(_entry(line) for line in raised))
    sections.append(textwrap.fill(_after_failure(waits=waits, in_place=in_place), _WIDTH))
    function.__doc__ = "\n\n".join(sections)
    return function


def _argument(kind: str, parameter: str, *, waits: bool, in_place: bool) -> str:
    if parameter not in ("tensor", "tensors"):
        return _ARGUMENTS[parameter]
    text, them, they = _TENSORS[kind], "it", "It"
    if parameter == "tensors":
        text, them, they = f"A list of tensors, executed together. Of each: {_lowered(text)}", "them", "They"
    if in_place:
        text += f" The result is written to {them}."
    if not waits:
        text += f" {they} {_IN_FLIGHT if in_place else _UNTIL_DONE}."
    return text


def _output(kind: str, *, grouped: bool, in_place: bool) -> str:
    if in_place:
        return "The given tensors, in a list." if grouped else "The given tensor."
    return f"For each tensor, in a list: {_lowered(_OUTPUTS[kind])}" if grouped else _OUTPUTS[kind]


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _after_failure(*, waits: bool, in_place: bool) -> str:
    where = "" if waits else "``synchronize`` raises what the waiting form does. "
    if in_place:
        return f"{where}After a failed collective the contents of what was given in place are undefined."
    return f"{where}After a failed collective there is no output, and the given tensors are untouched."


def _entry(text: str, hanging: str = "    ") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent=f"    {hanging}")

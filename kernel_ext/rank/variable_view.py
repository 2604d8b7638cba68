"""A rank's side of looking into its variables, also while a cell runs: on threads of their own, for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from hvdlab.bindings.framework_hooks import loaded
from hvdlab.kernel_ext.inspect.arrays import array_source
from hvdlab.kernel_ext.inspect.describing import describe, in_short, size_of
from hvdlab.kernel_ext.inspect.examination import Examination
from hvdlab.kernel_ext.inspect.leaves import leaves_of
from hvdlab.kernel_ext.inspect.scalars import type_name
from hvdlab.kernel_ext.rank.bounded import TookTooLong, bounded
from hvdlab.kernel_ext.rank.completion import user_variables
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.wire.codec import ToPool
from hvdlab.kernel_ext.wire.compare import (
    AskTensors,
    AskVariables,
    AskView,
    Tensor,
    Tensors,
    Variable,
    Variables,
    VariableView,
)

ViewRequest = AskView | AskVariables | AskTensors

WITHIN = 5.0
"""Seconds after which looking is given up."""

MOST_PARTS = 2000
"""Leaves of one variable that are looked at for an overview."""

MOST_NAMES = 500


class VariableViewer:
    """Answers questions about variables.

    Args:
        shell: Has the variables.
        cell: Id of the cell that runs, if one does.
        reply: Sends an answer; any thread.
    """

    def __init__(self, shell: Any, cell: Callable[[], str], reply: Callable[[ToPool], None]) -> None:
        self._shell, self._cell, self._reply = shell, cell, reply

    def ask(self, question: ViewRequest) -> None:
        """Take a question, and have a thread answer it. Control thread."""
        threading.Thread(target=self._look, args=(question,), name="hvdlab-looking", daemon=True).start()

    def _look(self, question: ViewRequest) -> None:
        try:
            answer = bounded(lambda: self._answer(question), WITHIN)
        except TookTooLong:
            answer = _failed(question, f"looking at it takes longer than {WITHIN:.0f} s")
        except BaseException as error:  # noqa: BLE001  # evaluating runs the user's code, which may also exit
            answer = _failed(question, one_line(error))
        self._reply(answer)

    def _answer(self, question: ViewRequest) -> ToPool:
        cell = self._cell()
        if isinstance(question, AskView):
            value = eval(question.expression, self._shell.user_global_ns, self._shell.user_ns)
            lines = tuple(describe(value))
            names = tuple(name for name in dir(value) if not name.startswith("_"))[:MOST_NAMES]
            return VariableView(
                question.ticket, lines, size_of(value, _nbytes(value)), cell=cell, names=names
            )
        if isinstance(question, AskVariables):
            return Variables(question.ticket, self._variables(question.budget), cell)
        return self._tensors(question, cell)

    def _variables(self, budget: int) -> tuple[Variable, ...]:
        walked = [(name, value, leaves_of(value, MOST_PARTS)) for name, value in user_variables(self._shell)]
        sizes = {name: sum(f.array.nbytes for f in leaves.found if f.array) for name, _, leaves in walked}
        digests: dict[str, bytes] = {}
        for name, value, leaves in sorted(walked, key=lambda one: sizes[one[0]]):
            budget -= sizes[name]
            if budget < 0:
                break
            if not leaves.left_out:
                digests[name] = Examination(value, walked=leaves).examined(0).digest
        return tuple(
            Variable(
                name,
                type_name(type(value)),
                in_short(value),
                size_of(value, sizes[name]),
                digests.get(name, b""),
            )
            for name, value, _ in walked
        )

    def _tensors(self, question: AskTensors, cell: str) -> Tensors:
        found: dict[tuple[str, int, int], Tensor] = {}
        unnamed: dict[tuple[Any, ...], Tensor] = {}
        for name, value in [
            *_named(self._shell),
            *(("", tensor) for hooks in loaded() for tensor in hooks.live_arrays()),
        ]:
            place = _memory(value)
            if place is None or place in found:
                continue
            source = array_source(value)
            if source is None:
                continue
            nbytes = place[2]
            one = Tensor(name, source.dtype, source.shape, source.device, nbytes)
            if name:
                found[place] = one
            else:
                found[place] = Tensor("", one.dtype, one.shape, one.device, 0)
                alike = (one.dtype, one.shape, one.device)
                before = unnamed.get(alike)
                count = before.count + 1 if before is not None else 1
                total = nbytes + (before.nbytes if before is not None else 0)
                unnamed[alike] = Tensor("", one.dtype, one.shape, one.device, total, count)
        all_of_them = [one for one in found.values() if one.name] + list(unnamed.values())
        largest = sorted(all_of_them, key=lambda one: -one.nbytes)
        return Tensors(
            question.ticket,
            tuple(largest[: question.most]),
            sum(one.count for one in all_of_them),
            sum(one.nbytes for one in all_of_them),
            cell,
        )


def _failed(question: ViewRequest, why: str) -> ToPool:
    if isinstance(question, AskView):
        return VariableView(question.ticket, error=why)
    if isinstance(question, AskVariables):
        return Variables(question.ticket, (), error=why)
    return Tensors(question.ticket, (), error=why)


def _nbytes(value: Any) -> int:
    return sum(found.array.nbytes for found in leaves_of(value, MOST_PARTS).found if found.array)


def _named(shell: Any) -> Iterator[tuple[str, Any]]:
    """Arrays that can be reached from variables, and the gradients of tensors among them."""
    for name, value in user_variables(shell):
        for leaf in leaves_of(value).found:
            if leaf.array is not None and leaf.value is not None:
                yield f"{name}{leaf.path}", leaf.value
                for hooks in loaded():
                    if (gradient := hooks.gradient(leaf.value)) is not None:
                        yield f"{name}{leaf.path}.grad", gradient


def _memory(value: Any) -> tuple[str, int, int] | None:
    """Where the memory of an array is, and how large: several arrays may look into one."""
    for hooks in loaded():
        if (place := hooks.memory(value)) is not None:
            return place
    size = getattr(value, "nbytes", None)
    return (str(getattr(value, "device", "cpu")), id(value), size) if isinstance(size, int) else None

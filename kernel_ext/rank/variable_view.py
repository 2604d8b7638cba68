"""A rank's side of views into its variables, also while a cell runs: on threads of their own, for a bounded time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.framework_hooks import ArraySource, loaded
from hvdlab.collectives.engine.engine import Engine
from hvdlab.kernel_ext.rank.compare import ComparedValue
from hvdlab.kernel_ext.rank.completion import TookTooLong, bounded, user_variables
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.rank.object_tree import (
    Bytes,
    Long,
    array_source,
    content,
    element,
    is_scalar,
    leaves_of,
    numeric,
    parts_of,
    shortened,
    type_name,
)
from hvdlab.kernel_ext.rank.status import MainThreadStatus
from hvdlab.kernel_ext.rank.values import short_repr
from hvdlab.kernel_ext.wire.codec import TO_POOL, ToPool, encode
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
from hvdlab.kernel_ext.wire.values import rough_size

ViewRequest = AskView | AskVariables | AskTensors

WITHIN = 5.0
"""Seconds after which a view is abandoned."""

MOST_VIEWED = 2000
"""Leaves of one variable that an overview counts, at most."""

MOST_NAMES = 500


class VariableViewer:
    """Viewer that answers the pool's questions about variables.

    Args:
        shell: Has the variables.
        engine: The rank's engine; it sends the answers.
        status: Names the cell that runs, if one does.
    """

    def __init__(self, shell: Any, engine: Engine, status: MainThreadStatus) -> None:
        self._shell, self._engine, self._status = shell, engine, status

    def ask(self, question: ViewRequest) -> None:
        """Have a thread answer a question. Control thread."""
        # A second thread beside that of bounded(), which waits: the control thread must not.
        threading.Thread(target=self._look, args=(question,), name="hvdlab-looking", daemon=True).start()

    def _look(self, question: ViewRequest) -> None:
        try:
            answer = bounded(lambda: self._answer(question), WITHIN)
        except TookTooLong:
            answer = _failed(question, f"looking at it takes longer than {WITHIN:.0f} s")
        except BaseException as error:  # noqa: BLE001  # evaluating runs the user's code, which may also exit
            answer = _failed(question, one_line(error))
        self._engine.post(TO_POOL, encode(answer))

    def _answer(self, question: ViewRequest) -> ToPool:
        cell = self._status.cell
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
        walked = [(name, value, leaves_of(value, MOST_VIEWED)) for name, value in user_variables(self._shell)]
        sizes = {name: sum(f.array.nbytes for f in leaves.found if f.array) for name, _, leaves in walked}
        digests: dict[str, bytes] = {}
        # Small ones first: most variables then have a fingerprint before the budget is used up.
        for name, value, leaves in sorted(walked, key=lambda one: sizes[one[0]]):
            budget -= sizes[name]
            if budget < 0:
                break
            # A fingerprint of a part could be equal where the rest differs.
            if not leaves.left_out:
                digests[name] = ComparedValue(value, walked=leaves).examined(0).digest
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
    return sum(found.array.nbytes for found in leaves_of(value, MOST_VIEWED).found if found.array)


def _named(shell: Any) -> Iterator[tuple[str, Any]]:
    """Yield arrays that can be reached from variables, and the gradients of tensors among them."""
    for name, value in user_variables(shell):
        for leaf in leaves_of(value).found:
            if leaf.array is not None and leaf.value is not None:
                yield f"{name}{leaf.path}", leaf.value
                for hooks in loaded():
                    if (gradient := hooks.gradient(leaf.value)) is not None:
                        yield f"{name}{leaf.path}.grad", gradient


def _memory(value: Any) -> tuple[str, int, int] | None:
    """Return the place and the size of an array's memory: several arrays may share one."""
    for hooks in loaded():
        if (place := hooks.memory(value)) is not None:
            return place
    size = getattr(value, "nbytes", None)
    return (str(getattr(value, "device", "cpu")), id(value), size) if isinstance(size, int) else None


SAMPLE = 32 << 20
"""Bytes of an array that its statistics are made of; of a larger array, these are blocks from all over it."""

BLOCKS = 16
FIRST = 6
"""Elements of an array that are shown."""
MOST_PARTS = 12
MOST_LINES = 20
REPR_WITHIN = 0.5
"""Seconds that a ``__repr__`` of the user's may take."""


def describe(value: Any) -> list[str]:
    """Return a line on a value, then more about it."""
    if (source := array_source(value)) is not None:
        return _array(type_name(type(value)), source)
    if is_scalar(value):
        return [f"{type_name(type(value))} {content(value)[1]}"]
    parts = parts_of(value)
    if parts is None:
        return [f"{type_name(type(value))}", *_printed(value)]
    if isinstance(parts, Long):
        shown = [in_short(item) for item in parts.items[:FIRST]]
        more = ", …" if len(parts.items) > FIRST else ""
        return [f"{type_name(type(value))} of {len(parts.items):,}", f"{', '.join(shown)}{more}"]
    items = list(parts)
    lines = [in_short(value)]
    lines += [f"{step}: {in_short(part)}" for step, part in items[:MOST_PARTS]]
    if len(items) > MOST_PARTS:
        lines.append(f"… {len(items) - MOST_PARTS} more")
    return lines if _is_known(value) else [*lines, *_printed(value)]


def in_short(value: Any) -> str:
    """Return a value in one line, without code of the user's."""
    try:
        if is_scalar(value):
            return content(value)[1]
        source = array_source(value)
        if source is not None:
            return f"{type_name(type(value))} {source.dtype}{list(source.shape)}"
        parts = parts_of(value)
        name = type_name(type(value))
        if parts is None:
            return name
        count = len(parts.items) if isinstance(parts, Long) else len(list(parts))
        return f"{name} of {count:,}" if _is_known(value) else name
    except Exception as error:  # noqa: BLE001  # a framework may raise anything about what it can't do
        return f"{type_name(type(value))}: {one_line(error)}"


def _is_known(value: Any) -> bool:
    return (
        issubclass(type(value), (dict, list, tuple, set, frozenset))
        or type(value).__module__ == "collections"
    )


def _printed(value: Any) -> list[str]:
    """Return the lines of a value's own ``__repr__``, or one line with the reason why there is none."""
    try:
        text = bounded(lambda: short_repr(value), REPR_WITHIN)
    except TookTooLong:
        return [f"(its __repr__ took longer than {REPR_WITHIN} s)"]
    except BaseException as error:  # noqa: BLE001  # a user's __repr__ may raise anything, also SystemExit
        return [f"(its __repr__ raised {one_line(error)})"]
    lines = text.split("\n")
    shown = [shortened(line) for line in lines[:MOST_LINES]]
    return shown if len(lines) <= MOST_LINES else [*shown, f"… {len(lines) - MOST_LINES} more lines"]


def _array(name: str, source: ArraySource) -> list[str]:
    grad = "" if source.requires_grad is None else f", requires_grad={source.requires_grad}"
    head = f"{name} {source.dtype}{list(source.shape)} on {source.device}{grad}, {rough_size(source.nbytes)}"
    return [head, *_statistics(source), _preview(source)] if source.nbytes else [head]


def _statistics(source: ArraySource) -> list[str]:
    parts, sampled = _sample(source)
    numbers = [found for part in parts if (found := numeric(part, source.dtype, source.itemsize)) is not None]
    if not numbers or numbers[0].dtype.kind not in "biuf":
        return []
    finite = [_finite(part) for part in numbers]
    count = sum(part.size for part in finite)
    words = []
    if count:
        mean = sum(float(part.sum()) for part in finite) / count
        spread = sum(float(np.square(part - mean).sum()) for part in finite) / count
        words = [
            f"min {min(float(part.min()) for part in finite if part.size):.4g}",
            f"max {max(float(part.max()) for part in finite if part.size):.4g}",
            f"mean {mean:.4g}",
            f"std {spread**0.5:.4g}",
        ]
    nans = sum(int(np.isnan(part).sum()) for part in numbers if part.dtype.kind == "f")
    infs = sum(int(np.isinf(part).sum()) for part in numbers if part.dtype.kind == "f")
    words += [f"{nans:,} NaN"] if nans else []
    words += [f"{infs:,} infinite"] if infs else []
    of = f" (of {sum(part.size for part in numbers):,} elements from all over it)" if sampled else ""
    return [", ".join(words) + of]


def _finite(part: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = part.astype(np.float64)
    return wide if part.dtype.kind != "f" else wide[np.isfinite(wide)]


def _sample(source: ArraySource) -> tuple[Sequence[Bytes], bool]:
    """Return parts of an array, :data:`SAMPLE` bytes at most together, and whether there is more of it."""
    if source.nbytes <= SAMPLE:
        return [source.read(0, source.nbytes)], False
    length = SAMPLE // BLOCKS // source.itemsize * source.itemsize
    step = (source.nbytes - length) // (BLOCKS - 1) // source.itemsize * source.itemsize
    return [source.read(number * step, length) for number in range(BLOCKS)], True


def _preview(source: ArraySource) -> str:
    shown = min(FIRST, source.nbytes // source.itemsize)
    raw = source.read(0, shown * source.itemsize)
    width = source.itemsize
    words = [_short(element(raw[n * width : (n + 1) * width], source.dtype, width)) for n in range(shown)]
    return f"[{', '.join(words)}{', …' if source.nbytes > raw.nbytes else ''}]"


def _short(text: str) -> str:
    try:
        return f"{float(text):.5g}"
    except ValueError:
        return text


def size_of(value: Any, nbytes: int) -> int:
    """Return the bytes of a value whose arrays have ``nbytes``."""
    try:
        return nbytes or sys.getsizeof(value)
    except Exception:  # noqa: BLE001  # a user's __sizeof__ may raise anything
        return 0

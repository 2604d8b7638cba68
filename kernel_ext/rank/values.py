"""Values between a rank's variables and the pool, pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # no stubs

from hvdlab.bindings.framework_hooks import loaded
from hvdlab.kernel_ext.rank.failures import one_line, safe_str
from hvdlab.kernel_ext.wire.text import wire_text
from hvdlab.kernel_ext.wire.values import Done, PullValue, PushValue, Value

T = TypeVar("T")

LONGEST_REPR = 4096

INLINE = 4 << 20
"""Bytes of a value that go in one message at most."""

OUT_OF_BAND = 64 << 10
"""Bytes from which on an array is a part of its own and not copied into the pickle."""


class TooLarge(Exception):
    """The pickle would be larger than allowed."""


class _Bounded(io.BytesIO):
    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self._limit is not None and self.tell() + memoryview(data).nbytes > self._limit:
            raise TooLarge
        return super().write(data)


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """cloudpickle that moves frameworks' arrays to the CPU and drops the unused rest of what a view looks into.

    Args:
        file: Where the pickle goes.
        limit: Bytes that an array may have; a larger one is refused before it is copied.
        buffers: Takes the large arrays, which then stay out of the pickle; with None all are in it.
        move: Whether tensors of other devices are moved.
    """

    def __init__(
        self,
        file: Any,
        limit: int | None = None,
        buffers: list[memoryview] | None = None,
        *,
        move: bool = True,
    ) -> None:
        self._limit, self._apart, self._move = limit, buffers is not None, move

        def keep(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if buffers is None or raw.nbytes < OUT_OF_BAND:
                return True
            buffers.append(raw)
            return False

        super().__init__(
            file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep if self._apart else None
        )

    def reducer_override(self, obj: Any) -> Any:
        self._check_size(obj)
        for hooks in loaded():
            reduced = hooks.reduce(obj, move=self._move, apart=OUT_OF_BAND if self._apart else None)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)

    def _check_size(self, obj: Any) -> None:
        if self._limit is not None and any(hooks.nbytes(obj) > self._limit for hooks in loaded()):
            raise TooLarge


def dump_parts(value: Any, *, move: bool = True) -> list[memoryview]:
    """A pickle and the buffers that belong to it: large arrays as they are, uncopied. Raises as :func:`dump` does.

    Args:
        move: Whether tensors of other devices become CPU tensors.
    """
    stream, buffers = io.BytesIO(), list[memoryview]()
    ValuePickler(stream, None, buffers, move=move).dump(value)
    return [stream.getbuffer(), *buffers]


def rough_size(size: int) -> str:
    """``2.0 GiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"


def dump(value: Any, limit: int | None = None) -> bytes:
    """Pickle ``value``. Raises :class:`TooLarge` beyond ``limit`` bytes, and what the value's own methods raise."""
    buffer = _Bounded(limit)
    ValuePickler(buffer, limit).dump(value)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class DumpedValue:
    """A cell's value, pickled, or why there is no pickle of it.

    Attributes:
        pickled: The pickle; None if there is none.
        why: Why there is none.
        too_large: Whether that is because of its size.
    """

    pickled: bytes | None
    why: str = ""
    too_large: bool = False


def dump_result(value: Any, limit: int) -> DumpedValue:
    """Pickle a cell's value, if that takes no more than ``limit`` bytes."""
    try:
        return DumpedValue(dump(value, limit))
    except TooLarge:
        remedy = "give it a name in the cell, `%hvd_pull NAME` brings it"
        return DumpedValue(None, f"larger than {limit:,} bytes when pickled; {remedy}", too_large=True)
    except KeyboardInterrupt:
        return DumpedValue(None, "interrupted while it was pickled")
    except Exception as error:  # noqa: BLE001  # pickling runs the user's __reduce__
        return DumpedValue(None, f"it can't be pickled ({one_line(error)})")


def short_repr(value: Any, plain: str = "") -> str:
    """``plain`` or ``repr(value)``, bounded; never raises."""
    text = plain
    if not text:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001  # a user's __repr__ may raise anything
            text = f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}: {safe_str(error)[:200]}>"
    text = wire_text(text)
    return text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]}… ({len(text)} characters in all)"


def push(shell: Any, request: PushValue, brought: Callable[[int], Sequence[Any]]) -> Done:
    """Bind the values to their names; either all of them or none.

    Args:
        brought: Gives the parts of a lot.
    """
    try:
        # From the pool that started this rank, at its user's request: no less trusted than the cells themselves.
        if request.lot:
            stream, *buffers = brought(request.lot)
            values = pickle.loads(stream, buffers=buffers)  # noqa: S301
        else:
            values = [pickle.loads(raw) for raw in request.pickles]  # noqa: S301
        shell.push(dict(zip(request.names, values, strict=True)))
    except BaseException as error:  # noqa: BLE001  # unpickling runs the user's code, which may also exit
        return Done(request.ticket, one_line(error))
    return Done(request.ticket)


def pull(shell: Any, request: PullValue) -> tuple[Value, list[memoryview]]:
    """Evaluate and pickle each expression; one that fails does not keep the others back.

    Returns:
        The answer, and the parts of which it has only the sizes: there are some if one name is asked for and its
        value is too large for a message.
    """
    if len(request.names) == 1:
        return _pull_alone(shell, request)
    pickles: list[bytes | None] = []
    errors: list[str] = []
    for name in request.names:
        parts, error = _evaluate(shell, name, lambda value: dump(value, INLINE))
        pickles.append(parts)
        errors.append(error)
    return Value(request.ticket, tuple(pickles), tuple(errors)), []


def _pull_alone(shell: Any, request: PullValue) -> tuple[Value, list[memoryview]]:
    parts, error = _evaluate(shell, request.names[0], dump_parts)
    if parts is None:
        return Value(request.ticket, (None,), (error,)), []
    if sum(part.nbytes for part in parts) > INLINE:
        return Value(request.ticket, (None,), ("",), tuple(part.nbytes for part in parts)), parts
    raw, error = _evaluate(shell, request.names[0], dump)
    return Value(request.ticket, (raw,), (error,)), []


def _evaluate(shell: Any, name: str, pack: Callable[[Any], T]) -> tuple[T | None, str]:
    try:
        return pack(eval(name, shell.user_global_ns, shell.user_ns)), ""
    except TooLarge:
        return None, f"larger than {rough_size(INLINE)}; pull it by itself"
    except BaseException as error:  # noqa: BLE001  # evaluating and pickling run the user's code, which may also exit
        return None, one_line(error)

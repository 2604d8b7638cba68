"""Pickles of users' values: large arrays as buffers of their own, frameworks' tensors by their hooks."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # no stubs

from hvdlab.bindings.framework_hooks import loaded

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
            # Raised while the pickler writes: a value of any size costs no more memory than the limit.
            raise TooLarge
        return super().write(data)


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """cloudpickle that moves frameworks' arrays to the CPU and drops the unused rest of the array that a view looks into.

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
        # Before the framework's hook, which copies the array from its device.
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
    """Return a pickle and the buffers that belong to it: large arrays as they are, uncopied. Raises as :func:`dump` does.

    Args:
        move: Whether tensors of other devices become CPU tensors.
    """
    stream, buffers = io.BytesIO(), list[memoryview]()
    ValuePickler(stream, None, buffers, move=move).dump(value)
    return [stream.getbuffer(), *buffers]


def dump(value: Any, limit: int | None = None) -> bytes:
    """Pickle ``value``. Raises :class:`TooLarge` beyond ``limit`` bytes, and any exception of the value's own methods."""
    buffer = _Bounded(limit)
    ValuePickler(buffer, limit).dump(value)
    return buffer.getvalue()

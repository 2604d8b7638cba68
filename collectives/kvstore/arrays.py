"""Arrays of stores: those of any framework as numpy views, by a registry, so that the stores know no framework; and their sums.

The arrays of one push are added in MXNet's order, so that sums are equal to its to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


_BLOCK = 1 << 15
"""Elements that are added at once: a few blocks of float32 stay in a core's cache."""


_Add = Callable[[Sequence[Array], Array, Array], None]


class RowSparse:
    """Array of which only some rows are stored; all others are zero.

    As an output it is changed in place: ``data`` and ``indices`` are replaced.

    Args:
        data: The stored rows, of shape ``(len(indices), *shape[1:])``.
        indices: Numbers of these rows, integers without repetition, in any order.
        shape: Shape of the whole array; at least one dimension.

    Attributes:
        data: The stored rows, in the order of ``indices``.
        indices: Their numbers, increasing, int64.
        shape: Shape of the whole array.

    Raises:
        ValueError: Shapes do not fit, or a row is out of range or given twice.
    """

    __slots__ = ("data", "indices", "shape")

    def __init__(self, data: Any, indices: Any, shape: Sequence[int]) -> None:
        rows, numbers = np.array(data), np.array(indices)
        self.shape = tuple(int(n) for n in shape)
        if numbers.size == 0:
            numbers = numbers.astype(np.int64).reshape(0)
            rows = rows.reshape(0, *self.shape[1:])
        if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
            raise ValueError(f"indices must be one row of integers, not {numbers.dtype}{list(numbers.shape)}")
        if not self.shape or rows.shape != (len(numbers), *self.shape[1:]):
            raise ValueError(
                f"{len(numbers)} rows of an array of shape {self.shape} were given as {rows.shape}"
            )
        order = np.argsort(numbers, kind="stable")
        self.indices = checked_rows(numbers, self.shape[0])[order]
        if len(self.indices) > 1 and (self.indices[1:] == self.indices[:-1]).any():
            raise ValueError("a row is given twice")
        self.data: Array = rows[order]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of ``data``."""
        return self.data.dtype

    def todense(self) -> Array:
        """Return the whole array, of shape ``shape``, as a new numpy array."""
        dense = np.zeros(self.shape, self.dtype)
        dense[self.indices] = self.data
        return dense

    def replace(self, indices: npt.NDArray[np.int64], data: Array) -> None:
        """Store these rows instead; ``indices`` increase, and ``data`` is cast to the element type as C does."""
        with np.errstate(invalid="ignore", over="ignore"):
            self.indices, self.data = indices.copy(), data.astype(self.dtype)

    def __repr__(self) -> str:
        return (
            f"RowSparse({len(self.indices)} of {self.shape[0]} rows, shape={self.shape}, dtype={self.dtype})"
        )


def checked_rows(rows: Array, count: int) -> npt.NDArray[np.int64]:
    """Return row numbers as int64.

    Raises:
        ValueError: A row is not from 0 to ``count - 1``, or no whole number; the text names the first such one.
    """
    numbers = rows.astype(np.int64)
    wrong = (numbers < 0) | (numbers >= count) | (numbers != rows)
    if wrong.any():
        raise ValueError(f"row {rows[wrong].flat[0]} is out of range: the array has rows 0 to {count - 1}")
    return numbers


def rows_of(sparse: RowSparse, wanted: npt.NDArray[np.int64]) -> Array:
    """Return rows of an array by increasing number; those that are not stored are zero."""
    data = np.zeros((len(wanted), *sparse.shape[1:]), sparse.dtype)
    _, there, here = np.intersect1d(wanted, sparse.indices, assume_unique=True, return_indices=True)
    data[there] = sparse.data[here]
    return data


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Type of arrays: the functions by which stores read and write those of one framework.

    Attributes:
        name: For texts.
        matches: Whether an object is such an array. It is called with any object, and must not import the framework.
        view: The array as a numpy array, without a copy where that is possible. Raises ``TypeError`` where the elements have
            no numpy type. The view is read, never written to.
        write_back: Copies a numpy array of the same shape into such an array, casting as C does. Raises ``TypeError`` if it
            can't be written to.
        wrap: Makes such an array of a numpy array, for updaters of the user's; shared memory or not.
        wrap_rows: The same of a row-sparse array.
        rows: A row-sparse array of the framework as one of ours; ``None`` if it is dense. Its ``replace`` writes to the framework's.
    """

    name: str
    matches: Callable[[Any], bool]
    view: Callable[[Any], Array]
    write_back: Callable[[Any, Array], None]
    wrap: Callable[[Array], Any] = lambda array: array
    wrap_rows: Callable[[RowSparse], Any] = lambda rows: rows
    rows: Callable[[Any], RowSparse | None] = lambda value: None


def _write_numpy(target: Array, array: Array) -> None:
    if not target.flags.writeable:
        raise TypeError("this array is read-only, and can't be an output")
    with np.errstate(invalid="ignore", over="ignore"):  # as C casts
        np.copyto(target, array, casting="unsafe")


def _is_buffer(value: Any) -> bool:
    if isinstance(value, str | bytes | np.generic):
        return False
    try:
        return bool(memoryview(value).format)
    except TypeError:
        return False


def _view_numpy(array: Array) -> Array:
    if array.dtype.kind not in "biuf":
        raise TypeError(f"arrays of {array.dtype} can't be stored")
    return array


NUMPY = ArrayType("numpy", lambda value: isinstance(value, np.ndarray), _view_numpy, _write_numpy)


_BUFFER = ArrayType(
    "buffer",
    _is_buffer,
    lambda value: _view_numpy(np.asarray(memoryview(value))),
    lambda value, array: _write_numpy(np.asarray(memoryview(value)), array),
)


_types: list[ArrayType] = [NUMPY]


def register_array_type(array_type: ArrayType) -> None:
    """Let the stores take arrays of another kind; one of the same name is replaced.

    Args:
        array_type: Access to the arrays of that kind.
    """
    _types[:] = [known for known in _types if known.name != array_type.name] + [array_type]


class FrameworkRows(RowSparse):
    """Row-sparse array of a framework. The class of each framework overrides :meth:`replace`, so that it writes to the framework's array.

    Args:
        data, indices, shape: See :class:`RowSparse`.
        array_type: The framework's.
    """

    __slots__ = ("array_type",)

    def __init__(self, data: Any, indices: Any, shape: Sequence[int], array_type: ArrayType) -> None:
        super().__init__(data, indices, shape)
        self.array_type = array_type


def adopted(value: Any) -> Any:
    """Return a framework's row-sparse array as a :class:`RowSparse`; any other value as it is."""
    array_type = None if isinstance(value, RowSparse) else array_type_of(value)
    rows = None if array_type is None else array_type.rows(value)
    return value if rows is None else rows


def array_type_of(value: Any) -> ArrayType | None:
    """Return the type by which to read and write this object, or ``None`` if it is no array (numbers, lists of numbers, text)."""
    if type(value) is np.ndarray:
        return NUMPY
    if isinstance(value, FrameworkRows):
        return value.array_type
    for array_type in (*_types, _BUFFER):
        if array_type.matches(value):
            return array_type
    return None


def array_type_named(name: str) -> ArrayType:
    """Return the type of arrays of this name; numpy's where no such framework is known here."""
    return next((array_type for array_type in _types if array_type.name == name), NUMPY)


def is_array(value: Any) -> bool:
    """Return whether the stores take this object as one array, dense or row-sparse."""
    return isinstance(value, RowSparse) or array_type_of(value) is not None


def view_of(value: Any) -> Array:
    """Return a dense array as a numpy array that is not to be written to. Raises ``TypeError`` if it is none."""
    array_type = array_type_of(value)
    if array_type is None:
        raise TypeError(f"a {type(value).__name__} is no array")
    return array_type.view(value)


def write(target: Any, array: Array) -> None:
    """Copy a numpy array of the same shape into an array of any framework, casting as C does."""
    array_type = array_type_of(target)
    assert array_type is not None
    array_type.write_back(target, array)


def _left_to_right(blocks: Sequence[Array], out: Array, scratch: Array) -> None:
    np.add(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        np.add(out, block, out=out)


def _by_fours(blocks: Sequence[Array], out: Array, scratch: Array) -> None:
    """Sum as ``x0 + (((x1 + x2) + x3) + x4)``, then the next four in the same way."""
    total = blocks[0]
    for first in range(1, len(blocks), 4):
        four = blocks[first : first + 4]
        if len(four) == 1:
            np.add(total, four[0], out=out)
        else:
            _left_to_right(four, scratch, scratch)
            np.add(total, scratch, out=out)
        total = out


def add_up(arrays: Sequence[Array], out: Array, *, on_devices: bool) -> None:
    """Sum arrays of one shape and type; integers wrap, float16 rounds after each addition.

    Args:
        arrays: At least one; of any layout.
        out: C-contiguous, of their shape and type; none of them.
        on_devices: From left to right, as the stores that reduce on devices do; by groups of four otherwise.
    """
    if len(arrays) == 1:
        np.copyto(out, arrays[0])
        return
    add: _Add = _left_to_right if on_devices else _by_fours
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    total = out.reshape(-1)
    scratch = np.empty(min(_BLOCK, total.size), total.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are values like others here
        for start in range(0, total.size, _BLOCK):
            part = total[start : start + _BLOCK]
            add([array[start : start + _BLOCK] for array in flat], part, scratch[: part.size])


def add_up_rows(arrays: Sequence[RowSparse]) -> RowSparse:
    """Sum row-sparse arrays of one shape and type over the union of their rows, from left to right."""
    indices = np.unique(np.concatenate([array.indices for array in arrays]))
    first = arrays[0]
    data = np.zeros((len(indices), *first.shape[1:]), first.dtype)
    for array in arrays:
        data[np.searchsorted(indices, array.indices)] += array.data
    return RowSparse(data, indices, first.shape)

"""Sums over the arrays of one push, in the order in which MXNet adds them, so that results are equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdlab.collectives.kvstore.arrays import Array, RowSparse

BLOCK = 1 << 15
"""Elements that are added at once: a few blocks of float32 stay in a core's cache."""

Add = Callable[[Sequence[Array], Array, Array], None]


def _left_to_right(blocks: Sequence[Array], out: Array, scratch: Array) -> None:
    np.add(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        np.add(out, block, out=out)


def _by_fours(blocks: Sequence[Array], out: Array, scratch: Array) -> None:
    """``x0 + (((x1 + x2) + x3) + x4)``, then the next four in the same way."""
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
        on_devices: Add from left to right, as the stores that reduce on devices do; else by groups of four.
    """
    if len(arrays) == 1:
        np.copyto(out, arrays[0])
        return
    add: Add = _left_to_right if on_devices else _by_fours
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    total = out.reshape(-1)
    scratch = np.empty(min(BLOCK, total.size), total.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are values like others here
        for start in range(0, total.size, BLOCK):
            part = total[start : start + BLOCK]
            add([array[start : start + BLOCK] for array in flat], part, scratch[: part.size])


def add_up_rows(arrays: Sequence[RowSparse]) -> RowSparse:
    """Sum row-sparse arrays of one shape and type over the union of their rows, from left to right."""
    indices = np.unique(np.concatenate([array.indices for array in arrays]))
    first = arrays[0]
    data = np.zeros((len(indices), *first.shape[1:]), first.dtype)
    for array in arrays:
        data[np.searchsorted(indices, array.indices)] += array.data
    return RowSparse(data, indices, first.shape)

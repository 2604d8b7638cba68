"""numpy views of the slots."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.shm.layout import Layout

SMALL_VIEWS = 128
"""Number of shapes for which short views are kept."""

StepViews = tuple[HostArray, ...]
"""The slots of one step, by member."""


class Slots:
    """All members' slots as arrays of one element type, by slot number and member."""

    def __init__(self, memory: mmap.mmap, layout: Layout) -> None:
        self._layout = layout
        self._bytes = np.frombuffer(memory, np.uint8)
        self._whole: dict[np.dtype[Any], list[StepViews]] = {}
        self._short: dict[tuple[np.dtype[Any], int], list[StepViews]] = {}

    def whole(self, dtype: np.dtype[Any]) -> list[StepViews]:
        """Views of whole slots: ``views[slot][member]``."""
        views = self._whole.get(dtype)
        if views is None:
            views = self._whole[dtype] = self._make(dtype, self._layout.chunk_bytes)
        return views

    def short(self, dtype: np.dtype[Any], count: int) -> list[StepViews]:
        """Views of the first ``count`` elements of each slot, kept for the next time."""
        views = self._short.get((dtype, count))
        if views is None:
            if len(self._short) >= SMALL_VIEWS:
                self._short.clear()
            views = self._short[dtype, count] = self._make(dtype, count * dtype.itemsize)
        return views

    def _make(self, dtype: np.dtype[Any], length: int) -> list[StepViews]:
        layout = self._layout
        return [
            tuple(self._view(layout.slot(m, slot), length, dtype) for m in range(layout.members))
            for slot in range(layout.slots)
        ]

    def _view(self, start: int, length: int, dtype: np.dtype[Any]) -> HostArray:
        view: HostArray = self._bytes[start : start + length].view(dtype)
        return view

    def close(self) -> None:
        """Drop all views, so that the memory can be unmapped."""
        self._whole.clear()
        self._short.clear()
        self._bytes = np.empty(0, np.uint8)

"""The two ways in which large buffers are reduced.

With two members each reads the other's chunk and adds it to its own input, straight into the output: one copy into a
slot, one addition, one synchronisation per chunk; as many bytes move between the cores as if each reduced one half.
With more members, or an expensive fold, each member reduces one slice of a chunk for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.shm.chunks import Piece, cut, slice_bounds
from hvdlab.collectives.planes.shm.slots import StepViews
from hvdlab.collectives.reduce.fold import Fold


class PairReduction:
    """Allreduce of two members without prescale, for a fold that is about as fast as a copy."""

    def __init__(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        index: int,
        chunk: int,
        fold: Fold,
        postscale: float,
    ) -> None:
        self._ins, self._outs, self._index = ins, outs, index
        self._fold, self._postscale = fold, postscale
        self._chunks = list(cut([len(b) for b in ins], chunk))

    @property
    def steps(self) -> int:
        return len(self._chunks)

    def fill(self, step: int, slots: StepViews) -> None:
        own, ins = slots[self._index], self._ins
        for buffer, start, at, length in self._chunks[step]:
            own[at : at + length] = ins[buffer][start : start + length]

    def take(self, step: int, slots: StepViews) -> None:
        index, fold, postscale = self._index, self._fold, self._postscale
        other = slots[1 - index]
        for buffer, start, at, length in self._chunks[step]:
            mine, theirs = self._ins[buffer][start : start + length], other[at : at + length]
            # Both members add in the order of their positions: the payload of a NaN depends on it.
            sources = (theirs, mine) if index else (mine, theirs)
            fold(sources, self._outs[buffer][start : start + length], 1.0, postscale)


class SlicedReduction:
    """Allreduce in which each member reduces a slice of every chunk for all; any number of members, any fold.

    The result of a slice goes into the slot of the member that reduced it, in the place where no other member looks for
    that one's input.
    """

    def __init__(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        index: int,
        members: int,
        chunk: int,
        fold: Fold,
        prescale: float,
        postscale: float,
    ) -> None:
        self._ins, self._outs, self._index, self._members = ins, outs, index, members
        self._fold, self._prescale, self._postscale = fold, prescale, postscale
        self._chunks = list(cut([len(b) for b in ins], chunk))
        self._grain = max(1, 64 // ins[0].itemsize)
        self._scratch = np.empty(0, ins[0].dtype)

    @property
    def steps(self) -> int:
        return len(self._chunks)

    def _bounds(self, pieces: list[Piece]) -> list[int]:
        return slice_bounds(pieces[-1].at + pieces[-1].length, self._members, self._grain)

    def fill(self, step: int, slots: StepViews) -> None:
        own, pieces = slots[self._index], self._chunks[step]
        if len(pieces) > 1:
            for buffer, start, at, length in pieces:
                own[at : at + length] = self._ins[buffer][start : start + length]
            return
        # This member's own slice is read from the input when it is reduced.
        bounds = self._bounds(pieces)
        before, after = bounds[self._index], bounds[self._index + 1]
        source = self._ins[pieces[0].buffer][pieces[0].start : pieces[0].start + pieces[0].length]
        if before:
            own[:before] = source[:before]
        if after < len(source):
            own[after : len(source)] = source[after:]

    def fold(self, step: int, slots: StepViews) -> None:
        pieces = self._chunks[step]
        bounds = self._bounds(pieces)
        lo, hi = bounds[self._index], bounds[self._index + 1]
        if lo == hi:
            return
        sources = [slot[lo:hi] for slot in slots]
        own = sources[self._index]
        if len(pieces) == 1:
            start = pieces[0].start
            sources[self._index] = self._ins[pieces[0].buffer][start + lo : start + hi]
            self._fold(sources, own, self._prescale, self._postscale)
            return
        # A fold may not overwrite a source that it has not read yet, so it can't write into this member's slot directly.
        if len(self._scratch) < hi - lo:
            self._scratch = np.empty(hi - lo, own.dtype)
        result = self._scratch[: hi - lo]
        self._fold(sources, result, self._prescale, self._postscale)
        own[:] = result

    def take(self, step: int, slots: StepViews) -> None:
        pieces = self._chunks[step]
        bounds = self._bounds(pieces)
        member = 0
        for buffer, start, at, length in pieces:
            out, end = self._outs[buffer], at + length
            while at < end:
                while bounds[member + 1] <= at:
                    member += 1
                stop = min(end, bounds[member + 1])
                out[start : start + stop - at] = slots[member][at:stop]
                start += stop - at
                at = stop

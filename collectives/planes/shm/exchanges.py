"""Operations in which members read what other members put into their slots, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.shm.slots import StepViews
from hvdlab.collectives.reduce.fold import Fold


def starts(counts: Sequence[int]) -> list[int]:
    """Where each of several consecutive parts begins."""
    return [0, *accumulate(counts)][:-1]


class AllGather:
    """Each member's part, a slot at a time; bytes."""

    def __init__(
        self, send: HostArray, counts: Sequence[int], out: HostArray, index: int, chunk: int
    ) -> None:
        self._send, self._counts, self._out, self._index, self._chunk = send, counts, out, index, chunk
        self._starts = starts(counts)
        self.steps = -(-max(counts) // chunk)

    def fill(self, step: int, slots: StepViews) -> None:
        part = self._send[step * self._chunk : (step + 1) * self._chunk]
        if len(part):
            slots[self._index][: len(part)] = part
            at = self._starts[self._index] + step * self._chunk
            self._out[at : at + len(part)] = part

    def take(self, step: int, slots: StepViews) -> None:
        done, chunk = step * self._chunk, self._chunk
        for member, count in enumerate(self._counts):
            length = min(chunk, count - done)
            if length > 0 and member != self._index:
                at = self._starts[member] + done
                self._out[at : at + length] = slots[member][:length]


class Broadcast:
    """The root's buffer, a slot at a time; bytes."""

    def __init__(self, buffer: HostArray, root: int, index: int, chunk: int) -> None:
        self._buffer, self._root, self._is_root, self._chunk = buffer, root, root == index, chunk
        self.steps = -(-len(buffer) // chunk)

    def fill(self, step: int, slots: StepViews) -> None:
        if self._is_root:
            part = self._buffer[step * self._chunk : (step + 1) * self._chunk]
            slots[self._root][: len(part)] = part

    def take(self, step: int, slots: StepViews) -> None:
        if not self._is_root:
            part = self._buffer[step * self._chunk : (step + 1) * self._chunk]
            part[:] = slots[self._root][: len(part)]


class AllToAll:
    """A slot is divided into a place for each receiver; bytes.

    ``steps`` is the number of steps that this member needs. No member knows all others' counts, so the members agree on the largest.
    """

    def __init__(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        index: int,
        place: int,
    ) -> None:
        self._send, self._out, self._index, self._place = send, out, index, place
        self._send_counts, self._recv_counts = send_counts, recv_counts
        self._send_starts, self._recv_starts = starts(send_counts), starts(recv_counts)
        self.steps = -(-max(*send_counts, *recv_counts) // place)

    def fill(self, step: int, slots: StepViews) -> None:
        done, place, own = step * self._place, self._place, slots[self._index]
        for member, count in enumerate(self._send_counts):
            length = min(place, count - done)
            if length > 0:
                at = self._send_starts[member] + done
                part = self._send[at : at + length]
                if member == self._index:
                    mine = self._recv_starts[member] + done
                    self._out[mine : mine + length] = part
                else:
                    own[member * place : member * place + length] = part

    def take(self, step: int, slots: StepViews) -> None:
        done, place, index = step * self._place, self._place, self._index
        for member, count in enumerate(self._recv_counts):
            length = min(place, count - done)
            if length > 0 and member != index:
                at = self._recv_starts[member] + done
                self._out[at : at + length] = slots[member][index * place : index * place + length]


class ReduceScatter:
    """A slot is divided into a place for each member, which reduces what all have put into its places; elements."""

    def __init__(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        index: int,
        place: int,
        fold: Fold,
        prescale: float,
        postscale: float,
    ) -> None:
        self._send, self._counts, self._out, self._index, self._place = send, counts, out, index, place
        self._fold, self._prescale, self._postscale = fold, prescale, postscale
        self._starts = starts(counts)
        self.steps = -(-max(counts) // place)

    def fill(self, step: int, slots: StepViews) -> None:
        done, place, own = step * self._place, self._place, slots[self._index]
        for member, count in enumerate(self._counts):
            length = min(place, count - done)
            if length > 0 and member != self._index:
                at = self._starts[member] + done
                own[member * place : member * place + length] = self._send[at : at + length]

    def take(self, step: int, slots: StepViews) -> None:
        done, place, index = step * self._place, self._place, self._index
        length = min(place, self._counts[index] - done)
        if length <= 0:
            return
        sources = [slot[index * place : index * place + length] for slot in slots]
        at = self._starts[index] + done
        sources[index] = self._send[at : at + length]
        self._fold(sources, self._out[done : done + length], self._prescale, self._postscale)

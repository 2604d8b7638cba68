"""The board: members of one host agree in shared memory on their next request, without a coordinator.

A member *posts* its n-th request: a digest of it and, if that is small, the tensor. Once all members have posted their
n-th, each compares the digests. If all are equal the request is *agreed*: every member has every tensor and computes the result
itself. If not, each member announces its request to the coordinator, as if there were no board.

Why all members see the same
----------------------------
* A post is one member's own word, written once, and never taken back. So whether the n-th request is agreed is a function of
  words that no longer change once all of them are there: there is nothing to decide, and no member that decides.
* A member with another request posts as well, by :meth:`AgreementBoard.decline`: a digest that equals none. That ends the waits of the others at
  the board; the coordinator asks for it when a member has waited for long.
* A member that leaves for good (:meth:`AgreementBoard.retire`) counts as having posted everything, and agreed to nothing from then on. So does one
  whose process is gone, and with it all threads that wrote its words: the others write them then, all the same (:meth:`AgreementBoard.mark_departed`).

Why nothing is overwritten too early
------------------------------------
Digests and tensors have two places, by the parity of n. A member that posts n + 2 has seen all posts of n + 1. A member that has
posted n + 1 has read all it needed of n, since it posts (and declines) only between its requests. So the place of n is free when n + 2 is
written. A member that has declined n without having waited for it checks first whether all have posted n (:attr:`AgreementBoard.vacant`).

:mod:`signals` orders the words that a waiting member reads: the count of posts is stored after digest and tensor, and read before them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from hvdlab.collectives.planes.base import HostArray, PlaneBroken
from hvdlab.collectives.planes.shm.layout import LINE, PAGE, WORD, AgreementBoardLayout
from hvdlab.collectives.planes.shm.signals import ARRIVED, Signals

MEMBERS = 128
"""Members of the largest process set that has a board: each reads the posts of all, and adds up the tensors of all."""
DECLINED = 0
"""The digest of a member that asks for nothing."""
_FOR_EVER = (1 << 62) - 1
"""More posts than there can be. (The words hold it twice over.)"""


class AgreementBoard:
    """View that one member has of the board. ``post``, ``decline`` and ``retire`` are called under the engine's lock.

    Args:
        memory: Descriptor of the process set's segment; it stays the caller's. -1 for memory of this process, for one member.
        offset: Where the board begins in it.
        members: Members of the process set.
        index: This member's position.
        generation: Generation of the process set.

    Attributes:
        generation: Generation of the process set.
        members: Members of the process set.
        capacity: Bytes of the largest tensor that a member can post; equal on all members.
        number: How many requests this member has posted or declined.
    """

    def __init__(self, memory: int, offset: int, members: int, index: int, generation: int) -> None:
        layout = AgreementBoardLayout(members)
        self.generation, self.members, self.number = generation, members, 0
        self.capacity = layout.place_bytes
        self._index = index
        self._memory = mmap.mmap(memory, layout.size, offset=offset)
        self._signals = Signals(self._memory, layout, index)
        whole = np.frombuffer(self._memory, np.uint8)
        # Where tensors are, by parity.
        self._areas: tuple[HostArray, ...] = tuple(
            whole[layout.area(parity) : layout.area(parity + 1)] for parity in (0, 1)
        )
        #: Digests of the members' requests, by parity.
        self._digests = tuple(self._signals.declared(parity) for parity in (0, 1))
        #: The last request that this member's thread has seen complete. Counts only grow, so it stays that.
        self._completed = 0
        self._retired = False

    def complete(self, number: int) -> bool:
        """Return whether all members have posted or declined their ``number``-th request."""
        return min(self._signals.arrived) >= number

    @property
    def vacant(self) -> bool:
        """Return whether this member may post its next request: all have posted the request that it has posted or declined last."""
        # The words of all members are read only if this one has declined its last request, and so has not waited for the others.
        return self._completed == self.number or self.complete(self.number)

    def post(self, digest: int, tensor: HostArray | None) -> int:
        """Post the next request.

        Args:
            digest: Digest of the request, in 64 bits; not :data:`DECLINED`.
            tensor: Its bytes, as ``uint8``; ``None`` if there are none, or the caller has put them in its row of :meth:`tensors`.

        Returns:
            The request's number.
        """
        number = self.number + 1
        parity = number & 1
        if tensor is not None:
            first = self._index * _distance(len(tensor))
            np.copyto(self._areas[parity][first : first + len(tensor)], tensor)
        # Tensor and digest are stored before the count, by which the others know that both are there.
        self._digests[parity][self._index] = digest
        # Before the count: if an interrupt ends this method here, the number is used up. Otherwise this member would store another digest
        # for a number whose first digest others have perhaps read already.
        self.number = number
        self._signals.post(ARRIVED, number)
        return number

    def tensors(self, parity: int, size: int) -> HostArray:
        """Return the members' tensors of requests of this parity that have so many bytes: a row of them for each member.

        The rows are as close to each other as the size allows: otherwise a member that reads
        those of a hundred others would have a hundred pages to find. So the places of members that post different sizes overlap;
        but then their requests differ, and none of their tensors is read.
        """
        distance = _distance(size)
        return self._areas[parity][: self.members * distance].reshape(self.members, distance)[:, :size]

    def decline(self) -> None:
        """Post that this member asks for nothing: its next request goes to the coordinator."""
        if not self._retired:
            self.post(DECLINED, None)

    def retire(self) -> None:
        """Decline the next request and all after it; nothing is posted any more.

        The other row of counters gets the first number that this member declines for good.
        """
        if not self._retired:
            self._retired = True
            # Before the count: a member that reads the count then also finds from which request on this one agrees to nothing.
            self._signals.reduced[self._index] = self.number + 1
            self._signals.post(ARRIVED, _FOR_EVER)

    def wait(self, number: int, seconds: float | None) -> bool:
        """Wait ``seconds`` (``None``: for ever) until all members have posted their ``number``-th request. Returns whether they have.

        Raises:
            PlaneAborted: :meth:`abort` was called, perhaps after all had posted.
        """
        try:
            self._signals.sleep(ARRIVED, number, None if seconds is None else time.monotonic() + seconds)
        # sleep() raises this when the time is over. On the board that is no failure: the rank asks for declines, and waits again.
        except PlaneBroken:
            return False
        return True

    def complete_soon(self, number: int) -> bool:
        """Return whether all members have posted their ``number``-th request, or do so while this one offers them its core.

        For the thread that posts, before :meth:`wait`: this neither sleeps nor needs a clock's limit.
        """
        if self._signals.reached_soon(ARRIVED, number):
            self._completed = number
            return True
        return False

    def agreed(self, number: int) -> bool:
        """Return whether all have posted the same ``number``-th request. Call it only when :meth:`complete` is true for that number."""
        asked = self._digests[number & 1]
        mine = asked[self._index]
        # Compared as bytes, and zeros all at once, since each of many members reads the words of all.
        if mine == DECLINED or asked.tobytes() != mine.to_bytes(WORD, sys.byteorder) * self.members:
            return False
        retired = self._signals.reduced
        return not any(retired) or not any(0 < first <= number for first in retired)

    def mark_departed(self, members: Sequence[int]) -> None:
        """Decline for members whose processes are gone, given by position, all that they had not posted.

        Any thread but one that posts. Several members may do it at a time, and write the same.
        """
        signals = self._signals
        for member in members:
            posted = signals.arrived[member]
            if posted < _FOR_EVER:
                # In the order of retire(). Plain stores do: the process is gone, and members that do this at the same time store the same.
                signals.reduced[member] = posted + 1
                signals.arrived[member] = _FOR_EVER
        signals.nudge()

    def abort(self) -> None:
        """End the waits of this member. Any thread; idempotent."""
        self._signals.abort()

    def close(self) -> None:
        """Release the memory. No thread may wait at the board any more; arrays of :meth:`tensors` in use keep it until they are gone."""
        self._areas = ()
        self._signals.close()
        with contextlib.suppress(BufferError):
            # A BufferError means that an array of tensors() is in use; the memory is unmapped when that goes.
            self._memory.close()


def _distance(size: int) -> int:
    """Return the bytes from one member's tensor of this size to the next one's: whole cache lines."""
    return -(-size // LINE) * LINE


def map_board(memory: int, offset: int, members: int, index: int, generation: int) -> AgreementBoard | None:
    """Return the board in this segment (-1: in memory of its own), or ``None`` if there is no room for one, or it can't be mapped."""
    size = AgreementBoardLayout(members).size
    if memory >= 0 and (offset % PAGE or os.fstat(memory).st_size < offset + size):
        return None
    try:
        return AgreementBoard(memory, offset, members, index, generation)
    except OSError:  # no descriptors: `SharedMemoryRetry` and the plane handle and report that
        return None

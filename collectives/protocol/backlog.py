"""Frames that a socket has not taken yet, and which of them is next. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

Frame = tuple[memoryview, int]
"""The rest of a frame, and a descriptor that goes with it, or -1."""


class Backlog:
    """A queue in which ``bulk`` frames wait for all others. Within each kind the order stays.

    A frame of which sending was begun, or only tried, is finished first: TLS has to be given again the bytes that it did not take.

    Attributes:
        nbytes: Bytes that wait.
    """

    __slots__ = ("_begun", "_bulk", "_first", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._begun: Frame | None = None
        self._first: deque[Frame] = deque()
        self._bulk: deque[Frame] = deque()

    def begin(self, view: memoryview, descriptor: int) -> None:
        """Keep the rest of a frame that was tried while nothing waited."""
        assert not self.nbytes
        self._begun = (view, descriptor)
        self.nbytes = len(view)

    def add(self, view: memoryview, descriptor: int, *, bulk: bool) -> None:
        """Keep a frame that has to wait."""
        (self._bulk if bulk else self._first).append((view, descriptor))
        self.nbytes += len(view)

    def next(self) -> Frame | None:
        """The frame to send now; ``None`` if none waits."""
        if self._begun is None:
            if self._first:
                self._begun = self._first.popleft()
            elif self._bulk:
                self._begun = self._bulk.popleft()
        return self._begun

    def sent(self, count: int) -> None:
        """``count`` bytes of :meth:`next` were sent, at least one; its descriptor went with them."""
        assert self._begun is not None
        view, _ = self._begun
        self.nbytes -= count
        self._begun = None if count == len(view) else (view[count:], -1)

    def clear(self) -> list[int]:
        """Drop all frames. Returns the descriptors that were kept with them."""
        kept = [descriptor for _, descriptor in self._all() if descriptor >= 0]
        self._begun, self.nbytes = None, 0
        self._first.clear()
        self._bulk.clear()
        return kept

    def _all(self) -> Iterator[Frame]:
        if self._begun is not None:
            yield self._begun
        yield from self._first
        yield from self._bulk

"""Process sets whose memory did not reach this rank, for lack of a file descriptor."""

from __future__ import annotations

import os
from collections.abc import Callable

from hvdlab.collectives.protocol import messages as m

AGAIN = 0.5
"""Seconds between two looks whether there are descriptors; the system does not tell."""
NEEDED = 3
"""Descriptors that the memory takes at most: the one that comes, and one for each of the two mappings. With fewer the next epoch would
be no better, and the one after it would be asked for."""


class Lacking:
    """Asks for a new epoch, and with it for its memory, as soon as it could be had.

    Args:
        send: Sends a message; any thread.
        call_later: Has something called on the control thread.
    """

    def __init__(
        self, send: Callable[[m.Message], None], call_later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._send, self._call_later = send, call_later
        self._epochs: dict[int, int] = {}
        self._looking = False

    def lost(self, process_set: int, epoch: int) -> None:
        """The memory of an epoch has not come. Control thread."""
        self._epochs[process_set] = epoch
        self._look_later()

    def came(self, process_set: int) -> None:
        """A newer epoch has all it needs. Control thread."""
        self._epochs.pop(process_set, None)

    def look(self) -> None:
        """Ask if it can be had now. Any thread; the epoch of a question that comes too late has ended."""
        if self._epochs and _has_descriptors():
            while self._epochs:
                self._send(m.Renew(*self._epochs.popitem()))

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            self._call_later(AGAIN, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self.look()
        if self._epochs:
            self._look_later()


def _has_descriptors() -> bool:
    found = []
    try:
        for _ in range(NEEDED):
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in found:
            os.close(descriptor)
    return True

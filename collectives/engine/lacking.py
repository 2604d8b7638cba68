"""Process sets whose memory did not reach this rank, for lack of a file descriptor."""

from __future__ import annotations

import os
from collections.abc import Callable

from hvdlab.collectives.protocol import messages as m

AGAIN = 0.5
"""Seconds between two looks whether descriptors are free; the system does not notify a process of that."""
NEEDED = 3
"""Descriptors that the memory takes at most: the one that comes, and one for each of the two mappings. With fewer free the next epoch
would lack its memory as well, and the rank would ask for yet another one."""


class Lacking:
    """Asks the coordinator for a new epoch, and so for its memory, as soon as enough descriptors are free.

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
        """The memory of an epoch has not reached this rank. Control thread."""
        self._epochs[process_set] = epoch
        self._look_later()

    def came(self, process_set: int) -> None:
        """A newer epoch has all it needs. Control thread."""
        self._epochs.pop(process_set, None)

    def look(self) -> None:
        """Ask for new epochs if enough descriptors are free now. Any thread; a question that comes too late names an ended epoch."""
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

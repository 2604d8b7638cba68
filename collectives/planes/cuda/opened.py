"""The pieces of other processes' GPU memory that this process has opened.

All groups of a process share them: a rank may be in several process sets with the same other rank, and the driver refuses to map a piece of memory
a second time while an older one at the same address of the same process is mapped.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hvdlab.collectives.planes.cuda.device import Device


@dataclass(slots=True)
class Opened:
    """A piece that is open.

    Attributes:
        owner: Random number of the process that allocated it.
        base: Its address in that process.
        serial: Its number among all pieces that the process ever allocated.
        pointer: Its address in this process; 0 once it is unmapped.
        users: How many groups have it open.
    """

    owner: int
    base: int
    serial: int
    pointer: int
    users: int = 1


class OpenedPieces:
    """What is open on one GPU. Any thread, with the GPU as the thread's current device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._guard = threading.Lock()
        #: By owner and base address.
        self._open: dict[tuple[int, int], Opened] = {}

    def open(self, owner: int, base: int, serial: int, handle: bytes) -> Opened:
        """Map a piece, or use it as it is mapped already. Raises ``DeviceFailed`` if the driver refuses."""
        with self._guard:
            found = self._open.get((owner, base))
            if found is not None and found.serial == serial:
                found.users += 1
                return found
            if found is not None:
                # Its owner has freed it, so every operation that used it has ended, whatever group still has it in its table.
                self._unmap(found)
            opened = Opened(owner, base, serial, self._device.open(handle))
            self._open[owner, base] = opened
            return opened

    def release(self, piece: Opened) -> None:
        """A group needs the piece no more."""
        with self._guard:
            piece.users -= 1
            if not piece.users and piece.pointer:
                self._unmap(piece)

    def _unmap(self, piece: Opened) -> None:
        del self._open[piece.owner, piece.base]
        pointer, piece.pointer = piece.pointer, 0
        self._device.close(pointer)

"""The data plane of one process set, epoch and device class, from its announcement to its close."""

from __future__ import annotations

import os
from collections.abc import Callable

from hvdlab.collectives.planes.base import Plane, PlaneAborted, PlaneContext
from hvdlab.collectives.planes.registry import plane_class
from hvdlab.collectives.planes.subgroups import PeerPlanes

CONNECT_TIMEOUT = 30.0

Scope = tuple[int, int, str]
"""Process set, epoch and device class."""


class PlaneSlot:
    """Holds what is needed to build a plane at its first use, then the plane.

    ``open`` and ``close`` belong to the thread that holds the lane's baton; ``abort`` may come from any thread.

    Args:
        name: Name of the plane.
        device: The device class that it is for.
        context: What the plane is built from.
        on_abort: Called by :meth:`abort`.

    Attributes:
        aborted: The epoch has ended; nothing more is executed in it.
        error: Why the plane failed here, if it did.
        under_way: Batches that were begun and have not ended yet, without a thread that waits for them. Belongs to the executor.
        operations: How many batches have begun on it; equal on all members between two of them. Belongs to the thread that holds the
            baton.
        outdated: A newer epoch has begun: the plane is closed once nothing is under way. Belongs to the executor.
    """

    def __init__(self, name: str, device: str, context: PlaneContext, on_abort: Callable[[], None]) -> None:
        self.name = name
        self.context = context
        self.scope: Scope = (context.process_set, context.epoch, device)
        self.under_way = self.operations = 0
        self.outdated = False
        self.plane: Plane | None = None
        self.aborted = False
        self.error: Exception | None = None
        self._on_abort = on_abort
        self._pairs: PeerPlanes | None = None
        self._connected = False
        self._closed = False
        self._slice = 0

    def open(self) -> Plane:
        """The plane, built and connected at the first call. Blocks; raises what the plane raises, ``PlaneAborted`` after an abort."""
        plane = self.plane
        if plane is None:
            plane = self.plane = plane_class(self.name)(self.context)
        if not self._connected:
            # The plane is stored before the flag is read, and abort() sets the flag before it reads the plane: one of them sees it.
            if self.aborted:
                raise PlaneAborted(f"epoch {self.context.epoch} has ended")
            plane.connect(float(self.context.options.get("connect_timeout", CONNECT_TIMEOUT)))
            self._connected = True
            plane.tune(self._slice)
        return plane

    def pairs(self) -> PeerPlanes:
        """What members exchange messages by. The plane itself need not be open, since the other members have no part in a message."""
        pairs = self._pairs
        if pairs is None:
            timeout = float(self.context.options.get("connect_timeout", CONNECT_TIMEOUT))
            pairs = self._pairs = PeerPlanes(self.name, self.context, timeout)
        if self.aborted:  # read after ``_pairs`` was stored, as in open()
            raise PlaneAborted(f"epoch {self.context.epoch} has ended")
        return pairs

    def tune(self, slice_bytes: int) -> None:
        """See :meth:`Plane.tune`; before the plane is connected the size is only noted."""
        self._slice = slice_bytes
        if self.plane is not None and self._connected:
            self.plane.tune(slice_bytes)

    def abort(self) -> None:
        """End whatever runs on the plane. Any thread; never blocks."""
        self.aborted = True
        if self.plane is not None:
            self.plane.abort()
        if self._pairs is not None:
            self._pairs.abort()
        self._on_abort()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self.aborted = True
        if self._pairs is not None:
            self._pairs.close()
        if self.plane is not None:
            self.plane.close()
        elif self.context.memory_fd >= 0:
            os.close(self.context.memory_fd)  # no plane was built that would have taken it over

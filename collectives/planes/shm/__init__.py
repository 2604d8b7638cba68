"""The shared-memory plane: ranks of one host exchange chunks through small slots that they all map.

``layout``           how the segment is divided, and buffers into chunks; imports no numpy, the coordinator sizes the segment with it
``signals``          counters of each member and the protocol by which members wait for them, on futexes
``schedules``        in which order a member's stages follow each other, why no slot is overwritten too early, and the operations' steps
``plane``            the operations; the size of chunks, measured
``agreement_board``  agreeing on small collectives without the coordinator
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdlab.collectives.planes.shm.plane import ShmPlane

__all__ = ["ShmPlane"]


def __getattr__(name: str) -> object:
    # Late, so that the coordinator can import `layout` without loading numpy.
    if name == "ShmPlane":
        from hvdlab.collectives.planes.shm.plane import ShmPlane

        return ShmPlane
    raise AttributeError(name)

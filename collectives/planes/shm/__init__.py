"""The shared-memory plane: ranks of one host exchange chunks through small slots that they all map.

``layout``    how the segment is divided; imports no numpy, the coordinator sizes the segment with it
``futex``     sleeping and waking in the kernel, the memory fence
``signals``   one counter per member and the protocol by which members wait for them
``pipeline``  in which order a member's stages follow each other, and why no slot is overwritten too early
``chunks``    how a list of buffers is cut into chunks
``plane``     the operations
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

"""The shared-memory plane: ranks of one host exchange chunks through small slots that they all map.

``layout``     how the segment is divided; imports no numpy, the coordinator sizes the segment with it
``futex``      sleeping and waking in the kernel, the memory fence
``signals``    counters of each member and the protocol by which members wait for them
``slots``      numpy views of the slots
``chunks``     how a list of buffers is cut into chunks
``pipeline``   in which order a member's stages follow each other, and why no slot is overwritten too early
``steps``      what an operation of many steps looks like to the plane that drives it
``exchanges``  operations in which members read what others put into their slots
``reductions`` the two ways in which large buffers are reduced
``plane``      the operations
``board``      agreeing on small collectives without the coordinator
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

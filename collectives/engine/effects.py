"""What the rank's state asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.planes.buffers import HOST
from hvdlab.collectives.protocol.messages import Member


@dataclass(slots=True)
class RunBatch:
    """Execute these entries as one operation of the plane of this process set, epoch and device class.

    With ``payloads``, every member's small tensor by position, no plane is needed.
    ``(process_set, sequence, batch)`` names the operation and is equal on all members. ``reported``: this rank tells the coordinator when
    it has been executed.
    """

    process_set: int
    epoch: int
    sequence: int
    batch: int
    entries: tuple[Entry, ...]
    tables: tuple[tuple[tuple[int, ...], ...], ...]
    payloads: tuple[bytes, ...] = ()
    device: str = HOST
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """End an entry with an error."""

    entry: Entry
    error: Exception


@dataclass(frozen=True, slots=True)
class Succeed:
    """End an entry that moves no data."""

    entry: Entry
    process_set: int = -1


@dataclass(frozen=True, slots=True)
class AbortPlane:
    """End what the plane of this process set and epoch is doing, now, and drop it."""

    process_set: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ClosePlanes:
    """Close the planes of this process set older than ``epoch`` once their work is done."""

    process_set: int
    epoch: int


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """A process set has a new epoch; ``index`` is -1 where this rank is no member.

    ``plane`` is for tensors of the host, ``device_planes`` are for those of other device classes.
    """

    process_set: int
    epoch: int
    index: int
    members: tuple[Member, ...]
    plane: str
    options: dict[str, str]
    has_memory: bool
    device_planes: dict[str, str]


Effect = RunBatch | Fail | Succeed | AbortPlane | ClosePlanes | NewEpoch

"""What a rank measured, as typed events: spans of collectives, cells, metrics, aborts.

Times are nanoseconds of the rank's ``CLOCK_MONOTONIC``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlab.collectives.dtypes import DType, OpKind


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor in one collective, as this rank saw it.

    ``(process_set, sequence, batch)`` names the plane operation and is equal on all members; tensors fused into one
    operation share it, as well as ``ready_ns``, ``started_ns``, ``finished_ns`` and the four durations, which were
    measured for the operation as a whole.

    Attributes:
        nbytes: Size of this tensor on this rank.
        submitted_ns: When this rank asked for it: its arrival.
        ready_ns: When the order to execute reached this rank; ``None`` if it failed before.
        started_ns: When the executor began with it; ``None`` if it failed before.
        finished_ns: When it was done, or when it failed.
        pack_ns: Sum of the time spent copying in. Pieces may interleave with those of the other phases.
        transfer_ns: Sum of the time spent moving and reducing.
        wait_ns: Sum of the time spent blocked on other members.
        unpack_ns: Sum of the time spent copying out.
        resolution_ns: Resolution of all times and durations but ``submitted_ns``; 1 for spans of up to 4.29 s.
        site: The user's line that asked for it, such as ``cell [7] line 4``; empty if it is not known.
    """

    name: str
    kind: OpKind
    dtype: DType
    process_set: int
    sequence: int
    batch: int
    nbytes: int
    submitted_ns: int
    ready_ns: int | None
    started_ns: int | None
    finished_ns: int
    pack_ns: int = 0
    transfer_ns: int = 0
    wait_ns: int = 0
    unpack_ns: int = 0
    ok: bool = True
    resolution_ns: int = 1
    site: str = ""


@dataclass(frozen=True, slots=True)
class CellBegin:
    """A cell began to run on this rank."""

    cell: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class CellEnd:
    """A cell ended on this rank."""

    cell: str
    time_ns: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """An epoch of a process set ended; ``text`` says why."""

    process_set: int
    epoch: int
    time_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that the user reported; ``value`` may be infinite or NaN."""

    name: str
    value: float
    step: int | None
    time_ns: int


@dataclass(frozen=True, slots=True)
class ClockSample:
    """This rank's clock against the coordinator's at ``time_ns`` (here): coordinator - here = offset ± uncertainty."""

    time_ns: int
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class Members:
    """A process set has this many members from this epoch on, none if it is gone; ``plane`` moves their data."""

    process_set: int
    epoch: int
    size: int
    time_ns: int
    plane: str = ""


Event = Span | CellBegin | CellEnd | Abort | Metric | ClockSample | Members


@dataclass(frozen=True, slots=True)
class Batch:
    """A decoded batch: the header's fields and the records."""

    rank: int
    clock: int
    dropped: int
    refused: int
    events: tuple[Event, ...]

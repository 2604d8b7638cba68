"""What ``pool.status()`` tells about each rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdlab.kernel_ext.payloads import PendingNow


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank now.

    Attributes:
        rank: Its number.
        host: Host that it runs on.
        pid: Its process there.
        device: Device that it computes on.
        state: ``idle``, ``running``, ``starting``, ``no answer``, or ``lost: `` and why.
        cell: Id of the cell that it runs.
        rss, pss: Resident and proportional set size in bytes; ``pss`` counts shared pages by their share.
        cpu: Seconds of processor time that it has used, or ``None`` if it did not answer.
        threads: Number of its threads.
        plane: Data plane that it uses.
        pending: Collectives that it is in.
    """

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    state: str = ""
    cell: str = ""
    rss: int = 0
    pss: int = 0
    cpu: float | None = None
    threads: int = 0
    plane: str = ""
    pending: tuple[PendingNow, ...] = field(default=())

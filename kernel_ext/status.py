"""What ``pool.status()`` returns about each rank."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from hvdlab.collectives.planes.links import Links
from hvdlab.kernel_ext.payloads import PendingNow, ServerNow


@dataclass(frozen=True, slots=True, repr=False)
class RankStatus:
    """One rank now. Its ``repr`` leaves out what is not known or not there.

    Attributes:
        rank: Its number.
        host: Host that it runs on.
        pid: Its process there; 0 if it has none.
        device: Device that it computes on.
        state: ``idle``, ``running``, ``starting``, ``no answer``, or ``lost: `` and why; of a rank that the pool has let go also
            that it ``leaves at the next commit``.
        cell: Id of the cell that it runs.
        rss, pss: Resident and proportional set size in bytes; ``pss`` counts shared pages by their share.
        cpu: Seconds of processor time that it has used, or ``None`` if it did not answer.
        threads: Number of its threads.
        plane: Data plane that it uses.
        pending: Collectives that it is in, and what else it waits for other ranks for.
        servers: Parameter servers of its key-value stores.
        device_memory: Bytes of GPUs' memory that its frameworks hold, used or kept for later.
        links: What its CUDA tensors go over to the other ranks, which it names by kind of link: ``same GPU``, ``NVLink``, ``PCIe``, ``peer
            access, link unknown``, ``link unknown``, ``network, through the host``, ``CUDA tensors through the host``. Empty before their first collective.
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
    pending: tuple[PendingNow, ...] = ()
    servers: tuple[ServerNow, ...] = ()
    device_memory: int = 0
    links: Links = field(default_factory=dict)

    def __repr__(self) -> str:
        values = (
            (f.name, getattr(self, f.name), {} if f.name == "links" else f.default) for f in fields(self)
        )
        shown = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({shown})"

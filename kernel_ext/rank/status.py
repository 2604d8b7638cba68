"""What a rank says about itself; read by the control thread, so also while the rank is busy."""

from __future__ import annotations

import os
import time

from hvdlab.bindings.framework_hooks import loaded
from hvdlab.collectives.engine.request import PendingCollective
from hvdlab.kernel_ext.payloads import PendingNow, Status


def make_status(
    ticket: int, *, state: str, cell: str, device: str, plane: str, pending: tuple[PendingNow, ...]
) -> Status:
    """Memory in bytes, ``cpu`` in seconds."""
    rss, pss = memory()
    return Status(
        ticket=ticket,
        state=state,
        cell=cell,
        rss=rss,
        pss=pss,
        cpu=time.process_time(),
        threads=len(os.listdir("/proc/self/task")),
        device=device,
        plane=plane,
        pending=pending,
    )


def memory() -> tuple[int, int]:
    """Resident and proportional set size of this process in bytes; ranks forked from one process share pages."""
    found = {"Rss": 0, "Pss": 0}
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except OSError:  # a kernel without it
        with open("/proc/self/statm", encoding="ascii") as file:
            found["Rss"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found["Pss"] = found["Rss"]
    return found["Rss"], found["Pss"]


def current_device() -> str:
    """The device that new arrays of the calling thread go to, ``cpu`` if no framework has begun to use another."""
    return next((device for hooks in loaded() if (device := hooks.current_device())), "cpu")


def pending_now(pending: list[PendingCollective]) -> tuple[PendingNow, ...]:
    """The collectives in flight, for the wire."""
    return tuple(PendingNow(p.kind, p.name, p.site, p.seconds, p.executing) for p in pending)

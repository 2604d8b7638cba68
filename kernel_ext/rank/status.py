"""What a rank says about itself; read by the control thread, so also while the rank is busy."""

from __future__ import annotations

import os
import sys
import time
from types import MappingProxyType

from hvdlab.bindings.framework_hooks import device_memory, loaded
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.request import PendingCollective
from hvdlab.collectives.planes.links import THROUGH_HOST, Links
from hvdlab.kernel_ext.wire.status import PendingNow, ServerNow, Status


def make_status(
    ticket: int,
    *,
    state: str,
    cell: str,
    device: str,
    plane: str,
    pending: tuple[PendingNow, ...],
    servers: tuple[ServerNow, ...] = (),
    links: Links = MappingProxyType({}),
) -> Status:
    """The answer to a question for the status; memory is in bytes, ``cpu`` in seconds."""
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
        device_memory=device_memory(),
        plane=plane,
        pending=pending,
        servers=servers,
        links=dict(links),
    )


def memory(process: str = "self") -> tuple[int, int]:
    """Resident and proportional set size of a process in bytes; ranks forked from one process share pages."""
    found = {"Rss": 0, "Pss": 0}
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except OSError:  # a kernel without it
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            found["Rss"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found["Pss"] = found["Rss"]
    return found["Rss"], found["Pss"]


def current_device() -> str:
    """The device that new arrays of the calling thread go to, ``cpu`` if no framework has begun to use another."""
    return next((device for hooks in loaded() if (device := hooks.current_device())), "cpu")


def links_now(engine: Engine) -> Links:
    """What this rank's CUDA tensors go over to the other ranks, as far as that is known."""
    if engine.device_planes():
        return engine.links()
    others = tuple(rank for rank in engine.ranks() if rank != engine.rank)
    return {THROUGH_HOST: others} if others and device_memory() else {}


def servers_now(engine: Engine) -> tuple[ServerNow, ...]:
    """The parameter servers that this rank is connected to, for the wire."""
    finding = sys.modules.get("hvdlab.collectives.kvstore.servers.finding")
    if finding is None:  # no store has been made; it needs numpy
        return ()
    return tuple(
        ServerNow(one.index, one.host, one.pid, one.keys, one.bytes, _memory_of(one.pid) if one.local else 0)
        for one in finding.known_servers(engine)
    )


def _memory_of(pid: int) -> int:
    try:
        return memory(str(pid))[1]
    except OSError:  # it has died
        return 0


def pending_now(pending: list[PendingCollective]) -> tuple[PendingNow, ...]:
    """The collectives in flight, for the wire."""
    return tuple(PendingNow(p.kind, p.name, p.site, p.seconds, p.executing) for p in pending)

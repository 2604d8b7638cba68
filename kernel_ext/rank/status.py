"""Status of a rank, and the stack of its main thread; read by the control thread, so also while the rank is busy."""

from __future__ import annotations

import linecache
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any

from hvdlab.bindings.framework_hooks import device_memory, loaded
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import PendingCollective
from hvdlab.collectives.planes.base import THROUGH_HOST, Links
from hvdlab.kernel_ext.rank.cell_source import label_of
from hvdlab.kernel_ext.rank.errors import is_internal, is_ours
from hvdlab.kernel_ext.wire.status import PendingNow, ServerNow, StackFrame, Status


@dataclass(slots=True)
class MainThreadStatus:
    """Status of a rank's main thread. That thread sets it, and any thread may read it.

    Attributes:
        state: ``running`` while a cell runs, ``idle`` otherwise.
        cell: Id of the cell that runs; empty between cells.
        device: Device to which new arrays of the last cell went.
    """

    state: str = "idle"
    cell: str = ""
    device: str = "cpu"


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
    """Return the answer to a question for the status; memory is in bytes, ``cpu`` in seconds."""
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
    """Return the device that new arrays of the calling thread go to, ``cpu`` if no framework has begun to use another."""
    for hooks in loaded():
        if device := hooks.current_device():
            return device
    return "cpu"


def links_now(engine: Engine) -> Links:
    """Return the links of this rank's CUDA tensors to the other ranks, as far as they are known."""
    if engine.device_planes():
        return engine.links()
    others = tuple(rank for rank in engine.ranks() if rank != engine.rank)
    return {THROUGH_HOST: others} if others and device_memory() else {}


def servers_now(engine: Engine) -> tuple[ServerNow, ...]:
    """Return the parameter servers that this rank is connected to, for the wire."""
    finding = sys.modules.get("hvdlab.collectives.kvstore.servers.discovery")
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
    """Return the collectives in flight, for the wire."""
    return tuple(PendingNow(p.kind, p.name, p.site, p.seconds, p.executing) for p in pending)


DEEPEST_STACK = 200
"""How many of the innermost frames are reported at most."""


def cell_stack(thread: int, suspended: Any = None) -> tuple[StackFrame, ...]:
    """Return the frames of the cell that runs on ``thread``, from its first line to the innermost; none of hvdlab's below.

    Args:
        thread: Identifier of the thread.
        suspended: The cell's coroutine, if it awaits something: then the thread is elsewhere.
    """
    frames = list(_awaited(suspended)) if suspended is not None else _called(thread)
    first = next((i for i, frame in enumerate(frames) if label_of(frame.f_code.co_filename)), len(frames))
    frames = frames[first:]
    last = len(frames)
    while last and is_internal(frames[last - 1]):
        last -= 1
    # Frames of threading and the like stay if the user's own code waits in them; only below a frame of ours they are hidden.
    hidden = next((i for i in range(last, len(frames)) if is_ours(frames[i])), len(frames))
    return tuple(_describe(frame) for frame in frames[:hidden][-DEEPEST_STACK:])


def _called(thread: int) -> list[FrameType]:
    frames = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _awaited(awaitable: Any) -> Iterator[FrameType]:
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)


def _describe(frame: FrameType) -> StackFrame:
    code = frame.f_code
    # Only lines that are in memory: this runs on the control thread, where nothing may block.
    entry = linecache.cache.get(code.co_filename)
    lines = entry[2] if entry is not None and len(entry) > 2 else []
    text = lines[frame.f_lineno - 1].strip() if 0 < frame.f_lineno <= len(lines) else ""
    label = label_of(code.co_filename)
    return StackFrame(code.co_name, f"cell {label}" if label else code.co_filename, frame.f_lineno or 0, text)

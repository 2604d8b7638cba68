"""Processes, threads and lanes of a Chrome trace: where an event is put, and the event itself."""

from __future__ import annotations

from typing import Any, NamedTuple

TraceEvent = dict[str, Any]

# Thread tracks of a rank in the order they are shown. Each has room for lanes: slices that overlap need several.
LANES = 10
NOTES = "notes"
CLOCK_COMPARED = "CLOCK_COMPARED"
"""A note on a rank of another host: how well its clock is known."""
STORES = "stores"
"""Track of a rank's requests to parameter servers, and category of what the servers do for it."""
TRACKS = {
    "cells": "cells",
    "collectives": "collectives",
    STORES: "key-value stores",
    "phases": "phases: sums, order not measured",
    "cycles": "orders to execute",
    NOTES: "aborts and notes",
}
_FIRST_TID = {track: (number + 1) * LANES for number, track in enumerate(TRACKS)}
_MAIN_TID = _FIRST_TID["cells"]
# Processes that are not ranks. The marks of late ranks are apart from the ranks' own events, so that they can be
# looked through at one place (and so that every rank has as many events, by which Perfetto orders processes).
ARRIVALS_PID = 1_000_000
WRITER_PID = 2_000_000
SERVERS_PID = 3_000_000
"""Parameter servers, by their numbers from here on."""


class OpenCell(NamedTuple):
    """A cell that has begun: when on the common axis, and what was added to its time for that, in ns."""

    cell: str
    begin: int
    offset: int


def micros(nanoseconds: int) -> float:
    """Microseconds, the unit of the format; exact to the nanosecond for 104 days."""
    return nanoseconds / 1000


class Tracks:
    """Makes events and remembers what has been introduced, which lanes are taken and what is open."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._lane_ends: dict[tuple[int, str], list[int]] = {}
        self._cells: dict[int, list[OpenCell | None]] = {}
        self._latest: dict[int, int] = {}
        self._next_id = 0

    # -- ranks and their places ---------------------------------------------------------------------------------------

    def introduce(self, rank: int) -> list[TraceEvent]:
        """Name and place of a rank's process, once."""
        return self._introduce_process(rank, f"rank {rank}", rank)

    def _introduce_process(self, pid: int, name: str, order: int) -> list[TraceEvent]:
        if (pid, 0) in self._known:
            return []
        self._known.add((pid, 0))
        return [
            _meta("process_name", pid, 0, name=name),
            _meta("process_sort_index", pid, 0, sort_index=order),
        ]

    def _thread(self, rank: int, track: str, lane: int, out: list[TraceEvent]) -> int:
        tid = _tid(track, lane)
        if (rank, tid) not in self._known:
            self._known.add((rank, tid))
            name = TRACKS[track] + (f" {lane + 1}" if lane else "")
            out.append(_meta("thread_name", rank, tid, name=name))
            out.append(_meta("thread_sort_index", rank, tid, sort_index=tid))
        return tid

    def _seen(self, rank: int, time_ns: int) -> None:
        if time_ns > self._latest.get(rank, 0):
            self._latest[rank] = time_ns

    # -- slices -------------------------------------------------------------------------------------------------------

    def slice_lane(
        self, rank: int, track: str, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> list[TraceEvent]:
        """A slice on the first lane of the track that is free at ``begin``."""
        return self.slice_same_lane(rank, track, None, name, begin, end, args)[1]

    def slice_same_lane(
        self, rank: int, track: str, lane: int | None, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> tuple[int, list[TraceEvent]]:
        """As :meth:`slice_lane`, on a given lane that the caller knows to be free, or a new choice if ``None``."""
        ends = self._lane_ends.setdefault((rank, track), [])
        if lane is None:
            lane = next((number for number, busy in enumerate(ends) if busy <= begin), len(ends))
            if lane == len(ends):
                ends.append(end)
        ends[lane] = end
        out: list[TraceEvent] = []
        tid = self._thread(rank, track, lane, out)
        times = {"ts": micros(begin), "dur": micros(end - begin)}
        out.append({"ph": "X", "name": name, "cat": track, "pid": rank, "tid": tid, **times, "args": args})
        self._seen(rank, end)
        return lane, out

    def slice_async(
        self, rank: int, category: str, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> list[TraceEvent]:
        """A slice that may overlap others of its category."""
        self._next_id += 1
        common = {
            "cat": category,
            "name": name,
            "id2": {"local": f"0x{self._next_id:x}"},
            "pid": rank,
            "tid": _MAIN_TID,
        }
        self._seen(rank, end)
        return [
            {"ph": "b", **common, "ts": micros(begin), "args": args},
            {"ph": "e", **common, "ts": micros(end), "args": {}},
        ]

    # -- cells --------------------------------------------------------------------------------------------------------

    def begin_cell(self, rank: int, cell: str, time_ns: int, offset: int) -> list[TraceEvent]:
        """Open a slice, written at once, so that it is there even if this file ends before the cell does."""
        lanes = self._cells.setdefault(rank, [])
        ends = self._lane_ends.setdefault((rank, "cells"), [])
        begin = time_ns + offset
        free = (n for n, open_cell in enumerate(lanes) if open_cell is None and ends[n] <= begin)
        lane = next(free, len(lanes))
        if lane == len(lanes):
            lanes.append(None)
            ends.append(begin)
        lanes[lane] = OpenCell(cell, begin, offset)
        out: list[TraceEvent] = []
        tid = self._thread(rank, "cells", lane, out)
        where = {"pid": rank, "tid": tid, "ts": micros(time_ns + offset)}
        out.append({"ph": "B", "name": f"CELL {cell}", "cat": "cells", **where, "args": {"cell": cell}})
        self._seen(rank, time_ns + offset)
        return out

    def end_cell(self, rank: int, cell: str, time_ns: int, ok: bool, offset: int) -> list[TraceEvent]:
        """Close the cell's slice; if its begin is not in this file, say when it ended."""
        for lane, open_cell in enumerate(self._cells.get(rank, ())):
            # The offset of its begin, so that a better estimate in between can't turn it around.
            if (
                open_cell is not None
                and open_cell.cell == cell
                and open_cell.begin <= time_ns + open_cell.offset
            ):
                self._cells[rank][lane] = None
                return self._end(rank, lane, cell, time_ns + open_cell.offset, "ok" if ok else "failed")
        return self.instant(rank, "cells", f"CELL {cell} END", time_ns + offset, {"cell": cell, "ok": ok})

    def end_cells(self) -> list[TraceEvent]:
        """Close what still runs at the latest time seen on its rank, and say so."""
        out: list[TraceEvent] = []
        for rank, lanes in self._cells.items():
            for lane, open_cell in enumerate(lanes):
                if open_cell is not None:
                    out += self._end(
                        rank, lane, open_cell.cell, self._latest[rank], "running when the trace ended"
                    )
        self._cells.clear()
        return out

    def _end(self, rank: int, lane: int, cell: str, time_ns: int, status: str) -> list[TraceEvent]:
        where = {"pid": rank, "tid": _tid("cells", lane), "ts": micros(time_ns)}
        self._lane_ends[rank, "cells"][lane] = time_ns
        self._seen(rank, time_ns)
        return [{"ph": "E", "name": f"CELL {cell}", "cat": "cells", **where, "args": {"status": status}}]

    # -- parameter servers --------------------------------------------------------------------------------------------

    def slice_on_server(
        self, server: int, rank: int, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> list[TraceEvent]:
        """Trace events of one request that a parameter server handled for a rank."""
        pid = SERVERS_PID + server
        out = self._introduce_process(pid, f"parameter server {server}", pid)
        ends = self._lane_ends.setdefault((pid, f"rank {rank}"), [])
        lane = next((number for number, busy in enumerate(ends) if busy <= begin), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        tid = (rank + 1) * LANES + (lane if lane < LANES else lane * 1_000_000)
        if (pid, tid) not in self._known:
            self._known.add((pid, tid))
            title = f"for rank {rank}" + (f" {lane + 1}" if lane else "")
            out.append(_meta("thread_name", pid, tid, name=title))
            out.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
        times = {"ts": micros(begin), "dur": micros(end - begin)}
        out.append({"ph": "X", "name": name, "cat": STORES, "pid": pid, "tid": tid, **times, "args": args})
        return out

    # -- moments ------------------------------------------------------------------------------------------------------

    def instant(
        self, rank: int, track: str, name: str, time_ns: int | None, args: dict[str, Any], *, scope: str = "t"
    ) -> list[TraceEvent]:
        """A moment; ``None`` means the latest time seen on this rank."""
        out = self.introduce(rank)
        tid = self._thread(rank, track, 0, out)
        at = self._latest.get(rank, 0) if time_ns is None else time_ns
        where = {"pid": rank, "tid": tid, "ts": micros(at)}
        out.append({"ph": "i", "s": scope, "name": name, "cat": track, **where, "args": args})
        self._seen(rank, at)
        return out

    def last_arrival(self, rank: int, time_ns: int, args: dict[str, Any]) -> list[TraceEvent]:
        """The moment at which the rank that the others waited for came, on the track of that rank."""
        out = self._introduce_process(ARRIVALS_PID, "last arrivals", ARRIVALS_PID)
        tid = rank + 1
        if (ARRIVALS_PID, tid) not in self._known:
            self._known.add((ARRIVALS_PID, tid))
            out.append(_meta("thread_name", ARRIVALS_PID, tid, name=f"rank {rank} was last"))
            out.append(_meta("thread_sort_index", ARRIVALS_PID, tid, sort_index=tid))
        where = {"pid": ARRIVALS_PID, "tid": tid, "ts": micros(time_ns)}
        out.append({"ph": "i", "s": "t", "name": "LAST_ARRIVAL", "cat": "arrivals", **where, "args": args})
        return out

    def counter(self, rank: int, name: str, time_ns: int, value: float) -> list[TraceEvent]:
        """A value from this moment on."""
        self._seen(rank, time_ns)
        where = {"pid": rank, "tid": _MAIN_TID, "ts": micros(time_ns)}
        return [{"ph": "C", "name": name, "cat": "metrics", **where, "args": {"value": value}}]

    def writer_note(self, name: str, args: dict[str, Any]) -> list[TraceEvent]:
        """A moment of the trace as a whole."""
        out = self._introduce_process(WRITER_PID, "trace writer", WRITER_PID)
        where = {"pid": WRITER_PID, "tid": 0, "ts": micros(max(self._latest.values(), default=0))}
        out.append({"ph": "i", "s": "p", "name": name, "cat": NOTES, **where, "args": args})
        return out


def _tid(track: str, lane: int) -> int:
    """Lanes of a track are neighbours, unless there are uncommonly many."""
    return _FIRST_TID[track] + (lane if lane < LANES else lane * 1000)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0.0, "args": args}

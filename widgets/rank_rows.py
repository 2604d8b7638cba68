"""The ranks as rows of plain values: which are there, what each does, and which hold the others up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from hvdlab.collectives.tracing.rank_activity import RankSummary, shown_rate, slowest_rank, summarize
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import LEAVES

INTERVAL = 1.0
LOOKED_AT = 50_000
SECONDS = 10.0
STOPPED = "stopped"
HEARTBEAT = 2.0
"""Seconds after which a view gets a message although nothing is new, while a cell runs. A view that gets none for
five seconds says so (``ui/src/model/liveness.ts``)."""


def cell_runs(recording: Recording) -> bool:
    """Return whether a cell runs on any rank that is there."""
    if recording.closed:
        return False
    return any(recording.running(member.rank) for member in recording.membership.members)


def rank_rows(recording: Recording) -> list[dict[str, Any]]:
    """One row for each rank that is there, is lost or has recorded something."""
    membership = recording.membership
    summaries = {one.rank: one for one in summarize(recording, SECONDS, LOOKED_AT)}
    slowest = slowest_of(summaries.values())
    members = {member.rank: member for member in membership.members}
    deaths = {death.rank: death for death in membership.deaths if death.rank not in members}
    rows = []
    for rank in sorted({*members, *deaths, *membership.expected, *summaries}):
        row = asdict(summaries.get(rank, RankSummary(rank)))
        member, death, cell = members.get(rank), deaths.get(rank), recording.running(rank)
        state = "lost" if death else "starting" if member is None else "running" if cell else "idle"
        if member is None and not death and rank not in membership.expected:
            state = "left"
        if recording.closed and state in ("starting", "running", "idle"):
            state, cell = "ended", ""
        rows.append(
            {
                "rank": rank,
                "host": member.host.split("#")[0] if member else "",
                "pid": member.pid if member else 0,
                "plane": plane_text(recording.planes(rank)) if member else "",
                "state": state,
                "reason": death.reason if death else LEAVES if rank in membership.leaving else "",
                "cell": cell,
                "paused": recording.paused.get(rank, "") if member is not None else "",
                "spans": row["spans"],
                "timesLast": row["times_last"],
                "heldUp": row["held_up_ns"],
                "slowest": rank == slowest,
                "worst": row["worst_ns"],
                "wait": row["wait"],
                "work": row["work"],
                "bandwidth": row["bandwidth"],
            }
        )
    return rows


def slowest_of(summaries: Iterable[RankSummary]) -> int | None:
    """Return the rank that slows the others down; ``None`` if no rank stands out.

    Args:
        summaries: All ranks in the same stretch of time.
    """
    all_ranks = list(summaries)
    length_ns = max((one.length_ns for one in all_ranks), default=0)
    return slowest_rank({one.rank: one.held_up_ns for one in all_ranks}, length_ns)


def heading(rows: list[dict[str, Any]]) -> str:
    """The ranks in a line: ``4/4 ranks · running [7]``."""
    if not rows:
        return "waiting for ranks"
    expected = [row for row in rows if row["state"] != "left"]
    here = [row for row in expected if row["state"] in ("idle", "running")]
    cells = sorted({row["cell"] for row in here if row["cell"]})
    paused = paused_text({row["rank"]: row["paused"] for row in rows if row["paused"]})
    parts = [f"{len(here)}/{len(expected)} ranks", f"running {', '.join(cells)}" if cells else "idle", paused]
    return " · ".join(part for part in parts if part)


def paused_text(paused: Mapping[int, str]) -> str:
    """Which ranks are paused and why: ``rank 3 is at a prompt``; empty if none is."""
    reasons: dict[str, list[str]] = {}
    for rank, why in sorted(paused.items()):
        reasons.setdefault(why, []).append(str(rank))
    return "; ".join(
        f"rank {ranks[0]} is {why}" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are {why}"
        for why, ranks in reasons.items()
    )


def plane_text(planes: Mapping[int, str]) -> str:
    """The planes of a rank: ``shm``, with the process sets that use another plane: ``shm; set 1: gloo``."""
    world = planes.get(0, "")
    others: dict[str, list[str]] = {}
    for number, plane in sorted(planes.items()):
        if number and plane != world:
            others.setdefault(plane, []).append(str(number))
    parts = [
        f"{'set' if len(sets) == 1 else 'sets'} {', '.join(sets)}: {plane}" for plane, sets in others.items()
    ]
    return "; ".join(part for part in (world, *parts) if part)


def _pace(recording: Recording, rows: list[dict[str, Any]]) -> str:
    """Steps per second of the cells that run, if their ranks report any."""
    running = [row["rank"] for row in rows if row["state"] == "running"]
    if not running:
        return ""
    begins = [
        mark.begin_ns for mark in recording.annotations() if mark.kind == "cell" and mark.end_ns is None
    ]
    steps = shown_rate(recording, running, min(begins, default=None))
    return "" if steps is None else f" · {steps:.3g} steps/s"


class RankNews:
    """Tells a view about the ranks: at most once in ``INTERVAL`` seconds, and only if something is new."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.forget()

    def forget(self) -> None:
        """Have the next :meth:`take` return everything again."""
        self._version, self._at = -1, 0.0
        self._returned: dict[str, Any] = {}

    def take(self, last: bool = False) -> dict[str, Any]:
        """``ranks`` and ``heading``, or nothing if they are not new or came just before; ``last`` does not wait for that."""
        recording, now = self._recording, time.monotonic()
        if recording.version == self._version or (now < self._at + INTERVAL and not last):
            return {}
        self._version, self._at = recording.version, now
        rows = rank_rows(recording)
        news = {
            "ranks": rows,
            "heading": STOPPED if recording.closed else heading(rows) + _pace(recording, rows),
        }
        if news == self._returned:
            return {}
        self._returned = news
        return news

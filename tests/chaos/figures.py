"""Outcomes of trials, and the table that they make."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Outcome:
    """Outcome of one fault.

    Attributes:
        seed, number, plane: Which trial it was; a campaign with the same seed plays it again.
        fault, phase, victim: The fault, its place (a phase of a collective, ``between``, ``amid`` or ``apart`` from steps, ``any`` for
            an instant chosen from outside), and its rank.
        limit: Seconds within which the user must be notified.
        report: Seconds from the fault until the user was notified; None if never.
        next_collective: Seconds from the report until a collective of all kinds had worked on those that are left.
        repair: Seconds that it took to bring the rank back, if it was lost.
        hang: The step that did not end, if anything.
        lost: Memory of survivors that has changed.
        leaks: The leftovers.
        left_to_gloo: Groups that Gloo keeps because it can't cancel an operation, of which half a message has come.
        wrong: Other errors: a report that does not name the rank, a wrong result.
        said: The report.
        events: Events with their times, in seconds from the trial's beginning.
    """

    seed: int
    number: int
    plane: str
    fault: str
    phase: str
    victim: int
    limit: float
    report: float | None = None
    next_collective: float | None = None
    repair: float | None = None
    hang: str = ""
    lost: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    left_to_gloo: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    said: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all went well; the time to report is judged over many."""
        return not (self.hang or self.lost or self.leaks or self.wrong)

    def __str__(self) -> str:
        """Return the whole story, as a failure prints it."""
        lines = [
            f"seed {self.seed}, trial {self.number} on {self.plane}: {self.fault} ({self.phase}) on rank {self.victim}"
        ]
        if self.hang:
            lines.append(f"  hang: {self.hang}")
        for what in ("lost", "leaks", "wrong"):
            lines += [f"  {what}: {item}" for item in getattr(self, what)]
        lines += ["  report: " + self.said.replace("\n", "\n    ")] if self.said else []
        return "\n".join([*lines, *(f"  {event}" for event in self.events)])


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault, in the order in which they first came."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.fault, []).append(outcome)
    return [_row(name, group) for name, group in found.items()]


def _row(name: str, group: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "fault": name,
        "count": len(group),
        "phases": sorted({o.phase for o in group}),
        "limit_s": group[0].limit,
        "report_s": spread([o.report for o in group]),
        "late": sum(o.report is None or o.report > o.limit for o in group),
        "next_collective_s": spread([o.next_collective for o in group]),
        "repair_s": spread([o.repair for o in group]),
        "hangs": sum(bool(o.hang) for o in group),
        "lost_memory": sum(bool(o.lost) for o in group),
        "leaks": sum(bool(o.leaks) for o in group),
        "wrong": sum(bool(o.wrong) for o in group),
        "left_to_gloo": sum(len(o.left_to_gloo) for o in group),
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return median and worst of the values that there are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": round(statistics.median(known), 3), "worst": round(max(known), 3)}


COLUMNS = (
    "fault",
    "count",
    "median",
    "worst",
    "limit",
    "late",
    "hangs",
    "lost memory",
    "leaks",
    "wrong",
    "repair",
)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as texts, in the order of :data:`COLUMNS`."""
    report, repair = row["report_s"], row["repair_s"]
    seconds = [f"{report['median']:.2f} s", f"{report['worst']:.2f} s"] if report else ["-", "-"]
    return [
        row["fault"],
        str(row["count"]),
        *seconds,
        f"{row['limit_s']:g} s",
        *(str(row[name]) for name in ("late", "hangs", "lost_memory", "leaks", "wrong")),
        f"{repair['median']:.2f} s" if repair else "",
    ]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return rows for a terminal, with their sums."""
    lines = [list(COLUMNS), *map(cells, found), total(found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def total(found: Sequence[dict[str, Any]]) -> list[str]:
    sums = [sum(row[name] for row in found) for name in ("late", "hangs", "lost_memory", "leaks", "wrong")]
    return ["all", str(sum(row["count"] for row in found)), "", "", "", *map(str, sums), ""]


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result file, for a page."""
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)]]
    lines += [*map(cells, result["rows"]), [f"**{text}**" if text else "" for text in total(result["rows"])]]
    shown = ["| " + " | ".join(line) + " |" for line in lines]
    events = "changes" if str(result.get("campaign")).startswith("elastic") else "faults"
    machine = f"{result['faults']} {events}, {result['ranks']} ranks on {result['cores']} cores, Python {result['python']}"
    load = f", load average {result['load_average']}" if "load_average" in result else ""
    return "\n".join([f"{machine}{load}, seed {result['seed']}.", "", *shown])


def story(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome for a result file."""
    return {key: value for key, value in asdict(outcome).items() if value not in (None, "", [])}

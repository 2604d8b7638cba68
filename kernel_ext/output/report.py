"""What a failed cell shows: the cause first and whole, the consequences folded to one line for each group of ranks."""

from __future__ import annotations

import re

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.cells.results import CellResults, RootCause
from hvdlab.kernel_ext.payloads import CellError

_RED, _BOLD, _RESET = "\x1b[31m", "\x1b[1m", "\x1b[0m"


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def report(results: CellResults, *, colours: bool = True) -> list[str]:
    """Lines (with ANSI colours, unless ``colours`` is False) that tell why the cell failed; empty if it didn't."""
    cause = results.root_cause
    if cause is None:
        return []
    lines = _coloured(results, cause)
    return lines if colours else [_ANSI.sub("", line) for line in lines]


def _coloured(results: CellResults, cause: RootCause) -> list[str]:
    lines = [_headline(results, cause), *cause.traceback]
    others = _consequences(results, cause)
    if others and cause.traceback:
        lines.append("")
    return lines + others


def _headline(results: CellResults, cause: RootCause) -> str:
    if cause.ename == "RankDied":
        return f"{_RED}{_BOLD}{cause.evalue}{_RESET}"
    if cause.ename == "KeyboardInterrupt" and results.interrupted:
        return f"{_RED}KeyboardInterrupt{_RESET}: {cause.evalue}"
    if results.timed_out and cause.ename == "TimeoutError":
        where = f"; {format_ranks(cause.ranks[:1])} was here:" if cause.traceback else ""
        return f"{_RED}TimeoutError{_RESET}: {cause.evalue}{where}"
    how = "" if len(cause.ranks) == 1 else " with the same error"
    return f"{_RED}{_BOLD}{format_ranks(cause.ranks)} failed{how}:{_RESET}"


def _consequences(results: CellResults, cause: RootCause) -> list[str]:
    lines = [
        f"rank {death.rank} died: {death.reason}"
        for death in results.deaths.values()
        if not (cause.ename == "RankDied" and death.rank in cause.ranks)
    ]
    folded: dict[str, list[int]] = {}
    for rank, error in results.errors.items():
        if rank not in cause.ranks:
            folded.setdefault(_one_line(results, error), []).append(rank)
    lines += [f"{format_ranks(ranks)}: {line}" for line, ranks in folded.items()]
    if results.unanswered:
        lines.append(
            f"{format_ranks(results.unanswered)}: no answer to the interrupt, not waited for any longer"
        )
    return lines


def _one_line(results: CellResults, error: CellError) -> str:
    if error.interrupted:
        return "interrupted"
    if error.aborted and error.collective:
        return f"stopped in {error.collective}{_because(results, error)}"
    return f"{error.ename}: {error.evalue.strip().splitlines()[0] if error.evalue.strip() else ''}".rstrip(
        ": "
    )


def _because(results: CellResults, error: CellError) -> str:
    dead = [rank for rank in error.culprits if rank in results.deaths]
    failed = [rank for rank in error.culprits if rank in results.errors and rank not in dead]
    # A rank that came late is told that all who had stopped before are missing; those were only stopped themselves.
    failed = [rank for rank in failed if not results.errors[rank].aborted] or failed
    if dead:
        return f" because {format_ranks(dead)} died"
    if failed:
        interrupted = all(results.errors[rank].interrupted for rank in failed)
        was = "was" if len(failed) == 1 else "were"
        return f" because {format_ranks(failed)} " + (f"{was} interrupted" if interrupted else "failed")
    first = error.evalue.strip().splitlines()
    return f": {first[0]}" if first else ""

"""What the operator reads when a job fails or stalls."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import call_name, format_ranks
from hvdlab.collectives.membership import Stall
from hvdlab.collectives.text import visible
from hvdlab.runner.events import Failure
from hvdlab.runner.lines import Tail

MOST_LINES = 20


def failure_lines(failure: Failure, tails: Mapping[int, Tail], host: str = "") -> list[str]:
    """The report: which rank failed first, how, its last lines on stderr, and which ranks failed because of it.

    Args:
        failure: What the supervisor found.
        tails: The end of each rank's stderr, by rank.
        host: Name of the host of the rank that failed; empty if it is not worth naming.
    """
    where = f" on {host}" if host else ""
    how = str(failure.outcome) if failure.outcome is not None else "it does not end"
    error = f" ({visible(failure.error)})" if failure.error else ""
    if failure.outcome is None and failure.error:
        how, error = visible(failure.error), ""
    lines = [f"rank {failure.rank}{where} failed first: {how}{error}"]
    if failure.early:
        verb = "has" if len(failure.early) == 1 else "have"
        lines[0] = (
            f"{format_ranks(failure.early)} {verb} ended (exit code 0) while others still needed "
            f"{'it' if len(failure.early) == 1 else 'them'}; rank {failure.rank}{where}: {how}{error}"
        )
    tail = tails.get(failure.rank)
    last = tail.lines(MOST_LINES) if tail is not None else []
    if last:
        lines.append(f"the last lines of rank {failure.rank} on stderr:")
        lines += [f"  {line}" for line in last]
    if failure.followers:
        lines.append(f"{format_ranks(failure.followers)} failed because of it")
    return lines


def stall_line(stall: Stall) -> str:
    """The line on a collective that has been waiting for long."""
    call = call_name(OpKind(stall.kind).label, stall.name)
    site = f" ({visible(stall.sites[0])})" if stall.sites else ""
    return (
        f"stalled: {call}{site}: {format_ranks(stall.waited)} waiting for {stall.seconds:.0f} s; "
        f"{format_ranks(stall.missing)} missing"
    )

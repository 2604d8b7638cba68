"""How a job ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.launch.processes import ExitStatus


@dataclass(slots=True)
class JobResult:
    """Outcome of a job.

    Attributes:
        code: Its exit code.
        failed: The rank that failed first, or ``None``.
        failure: The lines that the operator got on that failure, or without them all other lines of the supervisor.
        outcomes: End of each rank.
        results: The function's results, pickled, by rank.
        left: Ranks that were let go, and have not come back, or that were given up since they did not come.
        stopped: The signal that ended it, or 0.
    """

    code: int = 0
    failed: int | None = None
    failure: list[str] = field(default_factory=list)
    outcomes: dict[int, ExitStatus] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    stopped: int = 0


def origin_of(rank: int, culprits: Mapping[int, Sequence[int]]) -> int:
    """Follow the failed ranks that a failed rank blames, up to one that failed for a reason of its own.

    Args:
        rank: A rank that failed.
        culprits: For each rank that failed the ranks that it blames, which need not have failed.
    """
    seen = {rank}
    while guilty := [r for r in culprits.get(rank, ()) if r in culprits and r not in seen]:
        rank = guilty[0]
        seen.add(rank)
    return rank

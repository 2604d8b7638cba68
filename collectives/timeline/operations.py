"""Finding the same operation in the records of all ranks, to say which rank came last.

An operation is named by ``(process_set, sequence, batch)``, which all members agree on. It is complete when all
members (of a message, the two) have recorded it and gone on, to their next operation or to nothing: a rank records the tensors of an
operation together, so that a batch which was not cut for its length does not end within one. The number of members comes from
:class:`~hvdlab.collectives.tracing.record_format.Members`. An operation that does not get complete (a rank died, records were lost, the
size is not known) is given out after a while as it is.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass, field

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.tracing.record_format import Members, Span

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """A span with what has to be added to its times to be on the common axis, and the error of that, in ns."""

    span: Span
    offset_ns: int
    uncertainty_ns: int

    @property
    def arrival_ns(self) -> int:
        return self.span.submitted_ns + self.offset_ns


@dataclass(slots=True)
class Operation:
    """The spans of one operation by rank, in the order in which each rank recorded them."""

    held_since: float
    size: int | None
    ranks: dict[int, list[Placed]] = field(default_factory=dict)

    def tensors(self) -> list[dict[int, Placed]]:
        """Each tensor's span by rank. Equal names (anonymous tensors) are matched in order."""
        found: dict[tuple[str, int], dict[int, Placed]] = {}
        for rank, spans in self.ranks.items():
            seen: dict[str, int] = {}
            for placed in spans:
                name = placed.span.name
                seen[name] = seen.get(name, -1) + 1
                found.setdefault((name, seen[name]), {})[rank] = placed
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When each rank came to one tensor's collective.

    Attributes:
        last: The rank that came last.
        offsets_ns: By rank, how much later than the first one it came.
        certain: Whether the last rank came later than the second last by more than the error of the clocks.
        ranks_missing: Whether records of some members are not here, so that one of them may have come later.
    """

    last: int
    offsets_ns: dict[int, int]
    certain: bool
    ranks_missing: bool

    @property
    def spread_ns(self) -> int:
        return self.offsets_ns[self.last]


def arrivals(by_rank: dict[int, Placed], size: int | None) -> Arrivals | None:
    """Compare the arrivals of one tensor; ``None`` if there are not two ranks to compare."""
    if len(by_rank) < 2:
        return None
    order = sorted(by_rank, key=lambda rank: (by_rank[rank].arrival_ns, rank))
    first = by_rank[order[0]].arrival_ns
    last, second = by_rank[order[-1]], by_rank[order[-2]]
    error = last.uncertainty_ns + second.uncertainty_ns
    return Arrivals(
        order[-1],
        {rank: by_rank[rank].arrival_ns - first for rank in sorted(by_rank)},
        last.arrival_ns - second.arrival_ns > error,
        size is None or len(by_rank) < size,
    )


class Operations:
    """Operations that wait for the records of more ranks. ``now`` is any steadily growing number of seconds."""

    def __init__(self, hold: float) -> None:
        self._hold = hold
        self._open: OrderedDict[Key, Operation] = OrderedDict()
        self._current: dict[int, Key] = {}
        self._left: set[Key] = set()
        self._sizes: dict[int, tuple[int, int]] = {}

    def members(self, event: Members) -> None:
        """Learn the size of a process set; news of an older epoch is ignored."""
        if event.size and event.epoch >= self._sizes.get(event.process_set, (0, 0))[0]:
            self._sizes[event.process_set] = (event.epoch, event.size)

    def introduce(self, event: Members) -> None:
        """Learn the size of a process set of which nothing is known yet: its record may come behind the spans that it is for."""
        if event.size:
            self._sizes.setdefault(event.process_set, (event.epoch, event.size))

    def add(self, rank: int, placed: Placed, now: float) -> Operation | None:
        """Take a span in. Returns an older operation that must be given out because this one has taken its name."""
        span = placed.span
        key = (span.process_set, span.sequence, span.batch)
        if span.kind.asks_server:  # such a span is of one key; collectives with equal numbers are fused
            key = (span.process_set, span.sequence, span.batch << 32 | zlib.crc32(span.name.encode()))
        operation = self._open.get(key)
        stale = None
        if operation is not None and _recorded_another(operation.ranks.get(rank), span):
            stale = self._open.pop(key)
            operation = None
        if operation is None:
            size = self._sizes.get(span.process_set)
            if span.kind is OpKind.SENDRECV:
                size = (0, 2)
            operation = self._open[key] = Operation(now, size[1] if size else None)
        operation.ranks.setdefault(rank, []).append(placed)
        previous = self._current.get(rank)
        if previous is not None and previous != key:
            self._left.add(previous)
        self._current[rank] = key
        return stale

    def pause(self, rank: int) -> None:
        """This rank has recorded nothing more for now: its last operation is whole."""
        previous = self._current.pop(rank, None)
        if previous is not None:
            self._left.add(previous)

    def completed(self) -> list[Operation]:
        """Take out the operations that are complete."""
        done = [key for key in self._left if self._is_complete(key)]
        self._left.clear()
        return [self._open.pop(key) for key in sorted(done)]

    def _is_complete(self, key: Key) -> bool:
        operation = self._open.get(key)
        if operation is None or operation.size is None or len(operation.ranks) < operation.size:
            return False
        return all(self._current.get(rank) != key for rank in operation.ranks)

    def expired(self, now: float) -> list[Operation]:
        """Take out the operations that were held for too long."""
        done = []
        while self._open and now >= next(iter(self._open.values())).held_since + self._hold:
            done.append(self._open.popitem(last=False)[1])
        return done

    def deadline(self) -> float | None:
        """When :meth:`expired` has something to give out next."""
        return next(iter(self._open.values())).held_since + self._hold if self._open else None

    def flush(self) -> list[Operation]:
        """Take out everything."""
        done = list(self._open.values())
        self._open.clear()
        return done


def _recorded_another(own: list[Placed] | None, span: Span) -> bool:
    if not own:
        return False
    first = own[0].span
    return (first.started_ns, first.finished_ns) != (span.started_ns, span.finished_ns)

"""Operations that ranks have been in the middle of for long, and members that may be the reason.

A member that was stopped, or whose code keeps the interpreter busy, does not do its part, and does not answer a ping either. A
healthy member answers it on its control thread, whatever its user's code does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hvdlab.collectives.coordinator.common import put_off
from hvdlab.collectives.coordinator.process_sets import ProcessSet
from hvdlab.collectives.coordinator.signatures import Defined
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState

ANSWER_WITHIN = 1.0
"""Seconds that members have to answer."""


def lead(every: float) -> float:
    """How many seconds before a report the members are asked, so that it comes in time."""
    return min(ANSWER_WITHIN, every / 2)


class Key(NamedTuple):
    """An operation, as the ranks that wait for its end name it."""

    process_set: int
    epoch: int
    name: str


class Operation:
    """An operation for whose end at least one rank has been waiting.

    Attributes:
        since: When the first rank began to wait.
        reported: How many times the stall time had passed when the operation was looked at last.
        asked: When its members were asked for a sign of life, or ``None``.
        silent: The members that have not answered.
    """

    __slots__ = ("asked", "reported", "silent", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.reported = 0
        self.asked: float | None = None
        self.silent: set[int] = set()


class Stuck(NamedTuple):
    """An operation whose members have been asked for a sign of life and did not all answer."""

    process_set: ProcessSet
    seconds: float
    collective: m.AbortedCollective


class Executions:
    """What is being executed and waited for, as far as ranks have said so."""

    def __init__(self) -> None:
        self._operations: dict[Key, Operation] = {}

    def answered(self, rank: int) -> None:
        """A rank has given a sign of life."""
        for operation in self._operations.values():
            operation.silent.discard(rank)

    def put_off(self, since: float, now: float) -> None:
        """The time from ``since`` to ``now`` does not count for any wait. Members that have been asked are asked again."""
        for operation in self._operations.values():
            operation.since = put_off(operation.since, since, now)
            operation.asked = None

    def look(self, state: CoordinatorState, now: float, every: float) -> tuple[list[Stuck], list[float]]:
        """Ask the members of operations that take long.

        Returns:
            The operations to report now, and the times at which to look again.
        """
        waits = _waits(state)
        self._operations = {
            key: self._operations.get(key) or Operation(since) for key, (since, _) in waits.items()
        }
        stuck: list[Stuck] = []
        upcoming: list[float] = []
        for key, operation in self._operations.items():
            ps = state.sets.by_id[key.process_set]
            if operation.asked is None and now >= _ask_at(operation, every):
                info = next(iter(waits[key][1].values())).info
                members = ps.members if info.from_any else info.between or ps.members
                operation.asked, operation.silent = now, set(members) - ps.gone
                state.outbox.send(ps.peers, m.Ping(0))
            elif operation.asked is not None and now >= operation.asked + ANSWER_WITHIN:
                operation.asked = None
                operation.reported = max(operation.reported + 1, int((now - operation.since) / every))
                if operation.silent:
                    report = _report(waits[key][1], operation.silent)
                    stuck.append(Stuck(ps, now - operation.since, report))
            asked = operation.asked
            upcoming.append(_ask_at(operation, every) if asked is None else asked + ANSWER_WITHIN)
        return stuck, upcoming


def _ask_at(operation: Operation, every: float) -> float:
    return operation.since + every * (operation.reported + 1) - lead(every)


def _waits(state: CoordinatorState) -> dict[Key, tuple[float, dict[int, Defined]]]:
    """The operations for whose end ranks wait: since when, and with which submission each of these ranks."""
    found: dict[Key, tuple[float, dict[int, Defined]]] = {}
    for rank, peer in state.membership.ranks.items():
        wait = peer.executing
        defined = peer.definitions.get(wait.local) if wait is not None else None
        if wait is None or defined is None:
            continue
        ps = state.sets.by_id.get(wait.process_set)
        if ps is None or ps.epoch != wait.epoch:
            continue
        since, waiting = found.setdefault(Key(ps.id, ps.epoch, defined.info.name), (wait.since, {}))
        waiting[rank] = defined
        if wait.since < since:
            found[Key(ps.id, ps.epoch, defined.info.name)] = (wait.since, waiting)
    return found


def _report(waiting: dict[int, Defined], silent: set[int]) -> m.AbortedCollective:
    info = next(iter(waiting.values())).info
    waited = tuple(sorted(waiting.keys() - silent))
    sites = tuple(waiting[rank].site for rank in waited)
    return m.AbortedCollective(info.kind, info.name, waited, tuple(sorted(silent)), sites)

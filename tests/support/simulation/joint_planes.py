"""Planes of a simulated job are a meeting: an operation ends when all its members have come to it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdlab.collectives.engine.entries import Entry, RunBatch
from hvdlab.collectives.engine.operations import source_of
from hvdlab.collectives.types import OpKind
from support.simulation.joint_ranks import Operation, SimEntry, SimRank


class Planes:
    """Planes of all sets and generations.

    Attributes:
        results: The result of each operation, as far as it must be equal on all ranks.
        received: The newest message that each process has received in a generation, by sender and channel.
    """

    def __init__(self, by_pid: Mapping[int, SimRank]) -> None:
        self._by_pid = by_pid
        self.results: dict[Operation, object] = {}
        self.received: dict[tuple[int, int, int, int, str], int] = {}

    def can_run(self, me: SimRank) -> bool:
        """Whether the next operation of this rank can end."""
        if me.keeps_lane:
            return False
        job = me.jobs[0]
        here = _operation(job)
        if here[:2] in me.aborted or here[:2] in me.broken or _is_local(job):
            return True
        others = self._parties(me, job)
        return all(
            here in o.done or (o.alive and o.jobs and not o.keeps_lane and _operation(o.jobs[0]) == here)
            for o in others
        )

    def meets_nobody(self, me: SimRank) -> bool:
        """Whether the plane notices that another rank will not come."""
        here = _operation(me.jobs[0])
        others = self._parties(me, me.jobs[0])
        return not me.keeps_lane and any(
            here not in o.done and (not o.alive or here[:2] in o.broken) for o in others
        )

    def break_one(self, me: SimRank) -> None:
        """Fail the next operation of this rank, and its plane with it."""
        job = me.jobs.popleft()
        me.broken.add((job.process_set, job.generation))
        me.state.plane_failed(job.process_set, job.generation, "RuntimeError: connection reset")

    def run(self, me: SimRank) -> None:
        """End the next operation of this rank."""
        job = me.jobs.popleft()
        here = _operation(job)
        if here[:2] in me.aborted or here[:2] in me.broken:
            return
        if job.entries[0].request.kind is OpKind.SENDRECV:
            self._run_message(me, job)
            return
        me.done.add(here)
        if not _is_local(job):
            me.operations[here[:2]] += 1
        names = tuple(f"{e.request.kind.label} {e.name}" for e in job.entries)
        me.order.setdefault(here[:2], []).append(names)
        result = self._result(me, job, names)
        for entry in job.entries:
            if me.state.finish(entry) and isinstance(entry, SimEntry):
                entry.complete(("done", *here, names, result))
        me.state.executed(job)

    def _parties(self, me: SimRank, job: RunBatch) -> list[SimRank]:
        """Return the ranks that an operation concerns."""
        members = [self._by_pid[pid] for pid in me.members[job.process_set, job.generation]]
        request = job.entries[0].request
        if request.kind is not OpKind.SENDRECV:
            return members
        return [other for other in members if other.rank in (source_of(job), request.ranks[-1])]

    def _run_message(self, me: SimRank, job: RunBatch) -> None:
        """A message ends on this rank: those of one sender and channel are received in the order in which they were sent."""
        here, source = _operation(job), source_of(job)
        (entry,) = job.entries
        request = entry.request
        parties = self._parties(me, job)
        assert {other.rank for other in parties} == {source, request.ranks[-1]}
        known = self.results.get(here)
        if job.payloads:
            number = int(np.frombuffer(job.payloads[0], np.float32)[0])
        elif known is not None:
            _, number = known  # type: ignore[misc]  # which this function has put there
        else:
            sends = job if me.rank == source else next(x.jobs[0] for x in parties if x.rank == source)
            assert _operation(sends) == here
            number = sends.entries[0].number  # type: ignore[attr-defined]  # no rank sends zeros
        assert self.results.setdefault(here, (source, number)) == (source, number), "two messages for one"
        if me.rank == request.ranks[-1]:
            key = (me.pid, *here[:2], source, request.channel)
            assert number > self.received.get(key, 0), "a message overtakes another"
            self.received[key] = number
        me.done.add(here)
        if me.state.finish(entry) and isinstance(entry, SimEntry):
            entry.complete(("message", *here, source, number))

    def _result(self, me: SimRank, job: RunBatch, names: tuple[str, ...]) -> object:
        """Return this rank's result, as far as it must be equal to the others'."""
        here = _operation(job)
        if _is_local(job):
            result: object = (names, job.tables, job.payloads)
        elif here in self.results:
            return self.results[here]
        else:
            jobs = [self._by_pid[pid].jobs for pid in me.members[here[:2]]]
            met = [me_jobs[0] if me_jobs and _operation(me_jobs[0]) == here else job for me_jobs in jobs]
            for other in met:
                assert tuple(f"{e.request.kind.label} {e.name}" for e in other.entries) == names
                assert other.tables == job.tables
            result = (names, job.tables, tuple(map(_tag, zip(*(x.entries for x in met), strict=True))))
        known = self.results.setdefault(here, result)
        assert known == result, f"{here} has two results"
        return known


def _operation(job: RunBatch) -> Operation:
    return (job.process_set, job.generation, job.sequence, job.batch)


def _is_local(job: RunBatch) -> bool:
    """Whether a rank does this without meeting the others."""
    return bool(job.payloads) or job.entries[0].request.kind is OpKind.JOIN


def _tag(entries: tuple[Entry, ...]) -> tuple[int, ...]:
    """Return which submissions met; 0 for the zeros of one that has joined."""
    return tuple(entry.number if isinstance(entry, SimEntry) else 0 for entry in entries)

"""Adding and removing process sets, and ending their epochs when a plane failed or ranks wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.deadlock import describe_deadlock, find_deadlock
from hvdlab.collectives.coordinator.negotiation import Impossible
from hvdlab.collectives.coordinator.process_sets import ProcessSet
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.signatures import describe
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


def change_sets(state: CoordinatorState, ps: ProcessSet, current: Round) -> None:
    """All members have submitted that a process set is added or removed: do it, or refuse it on all."""
    signature = current.info.signature
    if signature.kind == OpKind.ADD_PROCESS_SET:
        _add_set(state, ps, current, tuple(sorted(set(signature.ranks))))
        return
    target = _find_set(state, signature)
    if target is None:
        _refuse(state, ps, current, "there is no such process set")
        return
    state.sets.abort(target, CauseKind.MEMBERSHIP, (), f"process set {target.id} was removed")
    state.sets.remove(target, ps.peers)
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        batch = m.Batch((current.heads[rank].local,))
        state.outbox.send((peer,), m.Execute(ps.id, ps.epoch, ps.sequence, (batch,)))


def _add_set(state: CoordinatorState, ps: ProcessSet, current: Round, ranks: tuple[int, ...]) -> None:
    absent = [rank for rank in ranks if rank not in ps.members]
    if absent or not ranks:
        _refuse(
            state, ps, current, f"{format_ranks(absent)} not in the world" if absent else "it needs a rank"
        )
        return
    added = state.sets.add(ranks)
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        state.outbox.send((peer,), m.ProcessSetAdded(current.heads[rank].local, added.id, ranks))


def _find_set(state: CoordinatorState, signature: m.Signature) -> ProcessSet | None:
    """The process set to remove: by its id in ``root``, or else by its ranks."""
    if signature.root > 0:
        return state.sets.by_id.get(signature.root)
    for ps in state.sets:
        if ps.id > 0 and ps.members == tuple(sorted(set(signature.ranks))):
            return ps
    return None


def _refuse(state: CoordinatorState, ps: ProcessSet, current: Round, why: str) -> None:
    info = current.info
    verdict = Impossible(info.name, f"{describe(info.signature)}: {why}.")
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        state.outbox.send((peer,), verdict.message(ps.id, ps.epoch, (current.heads[rank].local,)))


def end_failures(state: CoordinatorState, now: float) -> None:
    """End the epochs whose plane failed a moment ago without a better explanation."""
    for ps in list(state.sets):
        if ps.failure is not None and now >= ps.failure[0]:
            _, rank, text = ps.failure
            state.sets.abort(ps, CauseKind.PLANE_FAILED, (rank,), _plane_failure(rank, text))
        if ps.past_failure is not None and now >= ps.past_failure[0]:
            _, epoch, rank, text = ps.past_failure
            ps.past_failure = None
            state.sets.abort_past(ps, epoch, CauseKind.PLANE_FAILED, (rank,), _plane_failure(rank, text))


def _plane_failure(rank: int, text: str) -> str:
    return f"the data plane failed on rank {rank}: {text}"


def end_deadlock(state: CoordinatorState) -> None:
    """End the epochs in which ranks wait for each other."""
    # A rank in which the user looks around is not stuck: what the user types there may be what others wait for.
    ranks = {rank: peer for rank, peer in state.membership.ranks.items() if rank not in state.pauses}
    idle = state.cells.idle - state.pauses.reasons.keys()
    stuck = find_deadlock(state.sets.by_id, ranks, idle)
    if stuck:
        text = describe_deadlock(stuck)
        for ps in {s.process_set.id: s.process_set for s in stuck.values()}.values():
            state.sets.abort(ps, CauseKind.DEADLOCK, sorted(stuck), text)

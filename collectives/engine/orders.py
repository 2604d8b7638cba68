"""How a rank's state takes what the coordinator has decided about its submissions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.entries import EXECUTING, Effect, Entry, Fail, RunBatch, Succeed, Zeros
from hvdlab.collectives.engine.process_set_view import SetState
from hvdlab.collectives.errors import (
    Cause,
    CauseKind,
    Disagreement,
    DuplicateNameError,
    InvalidRequestError,
    JoinedRanksError,
    MismatchError,
    Pending,
)
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.engine.state import RankState

Reaction = Callable[["RankState", Any], list[Effect]]


def _on_execute(state: RankState, message: m.Execute) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is None or message.epoch != group.epoch or group.withdrawn == group.epoch:
        return []  # an abort of this epoch is on its way
    effects: list[Effect] = []
    by_id = state.locals.by_id
    for number, batch in enumerate(message.batches):
        entries = []
        for id in batch.locals:
            entry = by_id[id].queue.popleft() if id >= 0 else _take_part(group, batch.zeros[-1 - id])
            entry.phase = EXECUTING
            if entry.waited:
                state.blocked(entry, entry.waited)
            entries.append(entry)
        kind = entries[0].request.kind
        if kind is OpKind.ADD_PROCESS_SET or kind is OpKind.REMOVE_PROCESS_SET:
            for entry in entries:
                state.end(entry)
                effects.append(Succeed(entry))
        else:
            effects.append(
                RunBatch(
                    group.id,
                    group.epoch,
                    message.sequence,
                    number,
                    tuple(entries),
                    batch.tables,
                    batch.payloads,
                    entries[0].request.device,
                    reported=batch.reported and group.index == 0,
                )
            )
    return effects


def _take_part(group: SetState, signature: m.Signature) -> Entry:
    """This rank has joined: make an entry with zeros for a collective that other members have submitted."""
    entry = Zeros(group.id, signature)
    entry.epoch = group.epoch
    group.pending[entry] = None
    return entry


def _heads(state: RankState, set_id: int, epoch: int, locals: tuple[int, ...]) -> list[Entry]:
    group = state.sets.get(set_id)
    if group is None or epoch != group.epoch or group.withdrawn == epoch:
        return []  # the ids may stand for something else by now; an abort is on its way
    entries = []
    for id in locals:
        entry = state.locals.take(id)
        if entry is not None:
            state.end(entry)
            entries.append(entry)
    return entries


def _on_reject(state: RankState, message: m.Reject) -> list[Effect]:
    parties = [Disagreement(p.ranks, p.request, p.site) for p in message.parties]
    return [
        Fail(entry, MismatchError(message.name, message.process_set, parties))
        for entry in _heads(state, message.process_set, message.epoch, message.locals)
    ]


def _on_reject_duplicate(state: RankState, message: m.RejectDuplicate) -> list[Effect]:
    return [
        Fail(entry, DuplicateNameError(message.name, message.first_site, message.second_site))
        for entry in _heads(state, message.process_set, message.epoch, message.locals)
    ]


def _on_decline(state: RankState, message: m.Decline) -> list[Effect]:
    def error() -> Exception:
        if message.joined:
            return JoinedRanksError(message.name, message.process_set, message.joined, message.reason)
        return InvalidRequestError(message.reason)

    return [
        Fail(entry, error()) for entry in _heads(state, message.process_set, message.epoch, message.locals)
    ]


def _on_cancelled(state: RankState, message: m.Cancelled) -> list[Effect]:
    if message.ticket >= 0:
        entries = state.cancelled(message.ticket)
    else:
        entries = _heads(state, message.process_set, message.epoch, message.locals)
    cause = Cause(CauseKind(message.kind), message.ranks, message.text, message.site)
    c = message.pending
    pending = Pending(
        OpKind(c.kind).label, c.name, c.waited, c.missing, dict(zip(c.waited, c.sites, strict=False))
    )
    return [Fail(entry, state.aborted(entry, cause, pending)) for entry in entries]


def _on_process_set_added(state: RankState, message: m.ProcessSetAdded) -> list[Effect]:
    state.memory.added(message.process_set, message.ranks)
    local = state.locals.by_id.get(message.local)
    if local is None or local.signature.kind != OpKind.ADD_PROCESS_SET or not local.queue:
        return []  # the addition was given up, and the id may stand for something else by now
    entry = local.queue.popleft()
    state.end(entry)
    return [Succeed(entry, message.process_set)]


ON_ORDERS: dict[type, Reaction] = {
    m.Execute: _on_execute,
    m.Reject: _on_reject,
    m.RejectDuplicate: _on_reject_duplicate,
    m.Decline: _on_decline,
    m.Cancelled: _on_cancelled,
    m.ProcessSetAdded: _on_process_set_added,
}

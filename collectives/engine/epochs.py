"""How a rank's state takes the ends and beginnings of epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.entries import (
    EXECUTING,
    HELD,
    POSTED,
    AbortPlane,
    ClosePlanes,
    Effect,
    Fail,
    NewEpoch,
)
from hvdlab.collectives.engine.orders import Reaction
from hvdlab.collectives.engine.process_set_view import SetState, check_request
from hvdlab.collectives.errors import Cause, CauseKind, InvalidRequestError, Pending
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.engine.state import RankState


def _on_abort(state: RankState, message: m.Abort) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is None:
        return []
    cause = Cause(CauseKind(message.kind), message.ranks, message.text, message.site)
    if message.epoch < group.epoch:
        return _end_past(state, group, message.epoch, cause)
    if state.elastic and group.id == 0:
        # The other ranks know that this attempt has failed, and must not meet what this rank would still submit in it.
        state.failure = cause
    known = {
        (c.kind, c.name): Pending(
            OpKind(c.kind).label, c.name, c.waited, c.missing, dict(zip(c.waited, c.sites, strict=False))
        )
        for c in message.pending
    }
    state.drop_announcements(group.id)
    effects: list[Effect] = [AbortPlane(group.id, message.epoch)]
    effects += state.fail_all(
        group,
        lambda entry: state.aborted(entry, cause, known.get((int(entry.request.kind), entry.name))),
        message.epoch,
    )
    group.epoch = message.epoch
    group.configured, group.withdrawn = False, -1
    return effects


def _end_past(state: RankState, group: SetState, epoch: int, cause: Cause) -> list[Effect]:
    """Fail what still executes of an earlier epoch, which had ended in order: it can't come to its end any more."""
    failed = state.fail_all(group, lambda entry: state.aborted(entry, cause), epoch)
    if failed and state.elastic and group.id == 0:
        state.failure = cause
    return [AbortPlane(group.id, epoch), *failed]


def _on_configure(state: RankState, message: m.Configure) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is None:
        group = state.sets[message.process_set] = SetState(message.process_set)
    elif message.epoch < group.epoch:
        return []
    group.retire_seat()
    ranks = tuple(member.rank for member in message.members)
    group.epoch, group.members, group.ranks = message.epoch, message.members, ranks
    group.index = ranks.index(state.rank) if state.rank in ranks else -1
    group.plane, group.options = message.plane, message.options
    group.device_planes, group.links, group.chunk_bytes = message.device_planes, {}, 0
    group.configured, group.withdrawn = True, -1
    if group.id == 0:
        state.memory.restored()
    effects: list[Effect] = [
        ClosePlanes(group.id, group.epoch),
        NewEpoch(
            group.id,
            group.epoch,
            group.index,
            group.members,
            group.plane,
            group.options,
            message.has_memory,
            group.device_planes,
        ),
    ]
    for entry in [entry for entry in group.pending if entry.phase == POSTED and entry.given_up]:
        # The request was agreed on a board when the last epoch ended, and its thread was interrupted before it could finish it.
        state.end(entry)
        kind, text, site = group.given_up or (CauseKind.INTERRUPTED, "it was interrupted", "")
        effects.append(Fail(entry, state.aborted(entry, Cause(kind, (state.rank,), text, site))))
    waiting = [entry for entry in group.pending if entry.phase not in (EXECUTING, POSTED)]
    if group.given_up is not None and any(entry.given_up for entry in waiting):
        # Other ranks wait for these entries: the epoch ends at once, and what was submitted later is for the one after it.
        for entry in waiting:
            entry.epoch = group.epoch + (not entry.given_up)
        state.end_epoch(group, group.given_up)
    else:
        group.given_up = None
        effects += _announce_again(state, group)
    return effects


def _announce_again(state: RankState, group: SetState) -> list[Effect]:
    """Announce in the new epoch what is pending and not executing; fail what no longer fits its members."""
    effects: list[Effect] = []
    state.drop_announcements(group.id)
    for entry in list(group.pending):
        if entry.phase in (EXECUTING, POSTED):
            continue  # if it is posted and the old board does not agree on it, the thread that waits there announces it
        state.locals.unqueue(entry)
        entry.phase = HELD
        try:
            if group.index < 0:
                raise InvalidRequestError(f"Rank {state.rank} is no longer in process set {group.id}.")
            check_request(group, entry)
        except InvalidRequestError as error:
            state.end(entry)
            effects.append(Fail(entry, error))
        else:
            entry.epoch = group.epoch
            state.announce(entry)
    state.cancel_again(group)
    return effects


def _on_dissolve(state: RankState, message: m.Dissolve) -> list[Effect]:
    state.memory.dissolved(message.process_set)
    group = state.sets.pop(message.process_set, None)
    if group is None:
        return []
    cause = Cause(CauseKind.MEMBERSHIP, (), f"process set {group.id} was removed")
    state.drop_announcements(group.id)
    effects = state.fail_all(group, lambda entry: state.aborted(entry, cause))
    if effects:
        effects.insert(0, AbortPlane(group.id, group.epoch))
    effects.append(ClosePlanes(group.id, group.epoch + 1))
    return effects


def _on_leave(state: RankState, message: m.Leave) -> list[Effect]:
    """The others go on without this rank: what is held for an epoch to come would wait for ever.

    What was announced in the last epoch is the coordinator's to refuse, and what executes in it comes to its end.
    """
    text = f"rank {state.rank} was let go, and the others go on without it"
    state.left_out = cause = Cause(CauseKind.MEMBERSHIP, (state.rank,), text)
    effects: list[Effect] = []
    for group in state.sets.values():
        for entry in [entry for entry in group.pending if entry.phase == HELD and not group.configured]:
            state.end(entry)
            effects.append(Fail(entry, state.aborted(entry, cause)))
    return effects


ON_EPOCHS: dict[type, Reaction] = {
    m.Abort: _on_abort,
    m.Configure: _on_configure,
    m.Dissolve: _on_dissolve,
    m.Leave: _on_leave,
}

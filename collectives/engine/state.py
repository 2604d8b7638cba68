"""The rank's side of negotiation as a pure state machine.

Users' requests and the coordinator's messages go in, effects come out; :meth:`RankState.take_messages` says what is
to be sent. No sockets, threads or clocks here: the engine holds its lock around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.effects import (
    AbortPlane,
    ClosePlanes,
    Effect,
    Fail,
    NewEpoch,
    RunBatch,
    Succeed,
)
from hvdlab.collectives.engine.entry import (
    ANNOUNCED,
    ENDED,
    EXECUTING,
    HELD,
    NO_LOCAL,
    Entry,
    Key,
    Local,
    SetState,
    matched_shape,
    signature_of,
)
from hvdlab.collectives.engine.joined import Zeros
from hvdlab.collectives.engine.small import payload_of
from hvdlab.collectives.errors import (
    AbortedError,
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

LOCAL_LIMIT = 4096


class RankState:
    """Submissions, announcements and epochs of one rank.

    Attributes:
        rank: This rank.
        sets: Process sets by id. Set 0 is the world.
        lost: Why nothing can be submitted any more, or ``None``.
        elastic: Whether elastic training goes on, in which all ranks begin again together after a failure.
        failure: Why nothing can be submitted before they do, or ``None``.
    """

    def __init__(self, rank: int, local_limit: int = LOCAL_LIMIT) -> None:
        self.rank = rank
        self.sets: dict[int, SetState] = {}
        self.lost: Cause | None = None
        self.elastic = False
        self.failure: Cause | None = None
        self._limit = local_limit
        self._locals: OrderedDict[Key, Local] = OrderedDict()
        self._by_id: dict[int, Local] = {}
        self._next = 0
        self._outbox: dict[int, list[Entry]] = {}
        self._messages: list[m.Message] = []
        self._handlers: dict[type, Callable[[Any], list[Effect]]] = {
            m.Execute: self._on_execute,
            m.Reject: self._on_reject,
            m.RejectDuplicate: self._on_reject_duplicate,
            m.Decline: self._on_decline,
            m.Abort: self._on_abort,
            m.Configure: self._on_configure,
            m.Dissolve: self._on_dissolve,
            m.ProcessSetAdded: self._on_process_set_added,
            m.Regrouped: self._on_regrouped,
        }

    # -- submissions ----------------------------------------------------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Take in a request and queue its announcement.

        Raises:
            InvalidRequestError: It is wrong on this rank alone; nothing was sent.
            DuplicateNameError: Its name is in flight; the other ranks are told.
            AbortedError: The coordinator is lost, or elastic training has to begin again.
        """
        request = entry.request
        if self.lost is not None:
            raise self.aborted(entry, self.lost)
        if self.failure is not None:
            raise self.aborted(entry, self.failure)
        group = self.sets.get(request.process_set)
        if group is None:
            raise InvalidRequestError(f"There is no process set {request.process_set} on this rank.")
        if group.index < 0 and group.configured:
            raise InvalidRequestError(
                f"Rank {self.rank} is not in process set {group.id} (ranks {list(group.ranks)}); "
                "only its members may call its collectives."
            )
        self._check(group, entry)
        self._name(group, entry)
        group.pending[entry] = None
        if group.configured:
            entry.epoch = group.epoch
            self._queue(entry)
        else:
            entry.epoch = group.epoch + 1

    def _check(self, group: SetState, entry: Entry) -> None:
        request = entry.request
        kind = request.kind
        if kind is OpKind.BROADCAST and group.configured and request.root not in group.ranks:
            raise InvalidRequestError(
                f"root {request.root} is not in process set {group.id}; its ranks are {list(group.ranks)}."
            )
        if kind is OpKind.ALLGATHER or kind is OpKind.ALLTOALL:
            assert request.input is not None
            rows = request.input.shape[0] if request.input.shape else 1
            entry.extra = (
                (rows,) if kind is OpKind.ALLGATHER else _splits(request.splits, rows, len(group.ranks))
            )

    def _name(self, group: SetState, entry: Entry) -> None:
        request = entry.request
        if request.name is None:
            entry.name = request.kind.label + ".noname"
            return
        entry.name = name = request.name
        if request.anonymous:
            return
        first = group.names.get(name)
        if first is not None:
            if first.phase == ANNOUNCED:
                self._messages.append(m.Duplicate(group.id, group.epoch, name, first.site, entry.site))
            raise DuplicateNameError(name, first.site, entry.site)
        group.names[name] = entry

    def _queue(self, entry: Entry) -> None:
        request = entry.request
        shape = matched_shape(request)
        key: Key = (
            entry.name, request.kind, shape, request.dtype, request.op, entry.site, request.process_set, request.root,
            request.prescale, request.postscale, request.group, request.device, request.ranks,
        )  # fmt: skip
        local = self._locals.get(key)
        if local is None:
            local = self._define(key, entry, shape)
        elif len(self._locals) * 2 > self._limit:
            self._locals.move_to_end(key)  # order only matters once ids become scarce
        entry.local = local
        entry.phase = ANNOUNCED
        local.queue.append(entry)
        box = self._outbox.get(request.process_set)
        if box is None:
            self._outbox[request.process_set] = [entry]
        else:
            box.append(entry)

    def _define(self, key: Key, entry: Entry, shape: tuple[int, ...]) -> Local:
        id = self._free_id()
        local = Local(id, key, signature_of(entry.request, entry.name, shape), entry.site)
        self._locals[key] = local
        self._by_id[id] = local
        return local

    def _free_id(self) -> int:
        """A new id while there are few; then the one that was not used for longest and has nothing in flight."""
        if self._next >= self._limit:
            for key, local in self._locals.items():
                if not local.queue:
                    del self._locals[key]
                    return local.id
        self._next += 1
        return self._next - 1

    # -- what to send ---------------------------------------------------------------------------------------------

    @property
    def has_messages(self) -> bool:
        return bool(self._outbox or self._messages)

    @property
    def queued(self) -> int:
        """How many announcements wait to be sent."""
        return sum(map(len, self._outbox.values()))

    def take_messages(self) -> list[m.Message]:
        """What is to be sent, in order. Announcements are gathered into one message per process set.

        A single small tensor goes along with its announcement.
        """
        out: list[m.Message] = []
        if self._outbox:
            for set_id, entries in self._outbox.items():
                out.append(self._announce(self.sets[set_id], entries))
            self._outbox = {}
        if self._messages:
            out += self._messages
            self._messages = []
        return out

    def _announce(self, group: SetState, entries: list[Entry]) -> m.Announce:
        definitions: tuple[m.Definition, ...] = ()
        extra = False
        for entry in entries:
            local = entry.local
            if not local.defined:
                local.defined = True
                definitions += (m.Definition(local.id, local.signature, local.site),)
            if entry.extra:
                extra = True
        return m.Announce(
            group.id,
            group.epoch,
            tuple([entry.local.id for entry in entries]),
            definitions,
            tuple([entry.extra for entry in entries]) if extra else (),
            payload_of(entries[0].request, len(group.ranks)) if len(entries) == 1 else b"",
        )

    def post(self, message: m.Message) -> None:
        """Send something else after the announcements that are queued."""
        self._messages.append(message)

    def blocked(self, entry: Entry, seconds: float) -> None:
        """The user's thread waits for ``entry``; nothing is said if it ended or was not announced."""
        if entry.phase == ANNOUNCED:
            self._messages.append(m.Blocked(entry.request.process_set, entry.epoch, entry.local.id, seconds))

    def unblocked(self, entry: Entry) -> None:
        """The wait that :meth:`blocked` told of is over."""
        self._messages.append(m.Blocked(entry.request.process_set, entry.epoch, -1, 0.0))

    def withdraw(self, set_id: int, kind: CauseKind, text: str, site: str = "") -> None:
        """Give up on everything pending: ask to end the epoch. What is submitted from now on is held for a later one."""
        group = self.sets.get(set_id)
        if group is None or self.lost is not None:
            return
        group.names.clear()  # they are free: what has them is only waiting for its end
        for entry in group.pending:
            entry.given_up = True
        if group.configured:
            self._end_epoch(group, (kind, text, site))
        elif group.given_up is None:
            group.given_up = (kind, text, site)

    def _end_epoch(self, group: SetState, why: tuple[CauseKind, str, str]) -> None:
        kind, text, site = why
        group.configured = False
        group.withdrawn = group.epoch
        group.given_up = why
        self._messages.append(m.Withdraw(group.id, group.epoch, kind.value, text, site))

    def plane_failed(self, set_id: int, epoch: int, text: str) -> None:
        """The data plane of an epoch failed here."""
        self._messages.append(m.PlaneFailed(set_id, epoch, text))

    # -- ends -----------------------------------------------------------------------------------------------------

    def finish(self, entry: Entry) -> bool:
        """The executor is done with this; whether it had not been failed in the meantime."""
        if entry.phase != EXECUTING:
            return False
        self._end(entry)
        return True

    def _end(self, entry: Entry) -> None:
        entry.phase = ENDED
        group = self.sets.get(entry.request.process_set)
        if group is not None:
            group.pending.pop(entry, None)
            if group.names.get(entry.name) is entry:
                del group.names[entry.name]

    def lose(self, cause: Cause) -> list[Effect]:
        """The coordinator is gone: everything pending fails, and whatever is submitted later."""
        self.lost = cause
        effects: list[Effect] = []
        for group in self.sets.values():
            effects.append(AbortPlane(group.id, group.epoch))
            effects += self._fail_all(group, lambda entry: self.aborted(entry, cause))
        self._outbox.clear()
        self._messages.clear()
        return effects

    def mend(self, text: str) -> None:
        """Start afresh after an exception tore a submission halfway.

        All ids are forgotten, what was queued is dropped, and the epoch of each process set is given up, so that
        neither side can be left with half of anything.
        """
        self._locals.clear()
        self._by_id.clear()
        self._next = 0
        self._outbox.clear()
        for group in self.sets.values():
            group.names = {e.name: e for e in group.pending if e.request.name and not e.request.anonymous}
            self.withdraw(group.id, CauseKind.INTERRUPTED, text)

    def _fail_all(
        self, group: SetState, error: Callable[[Entry], Exception], epoch: int | None = None
    ) -> list[Effect]:
        effects: list[Effect] = []
        for entry in list(group.pending):
            if epoch is None or entry.epoch <= epoch:
                self._unqueue(entry)
                self._end(entry)
                effects.append(Fail(entry, error(entry)))
        return effects

    def _unqueue(self, entry: Entry) -> None:
        """Forget an announcement. One that was not sent yet may have carried the definition: send it next time."""
        local = entry.local
        if entry.phase == ANNOUNCED and local is not NO_LOCAL:
            if local.queue and local.queue[0] is entry:
                local.queue.popleft()
            elif entry in local.queue:
                local.queue.remove(entry)

    def aborted(self, entry: Entry, cause: Cause, pending: Pending | None = None) -> AbortedError:
        """The error that ends ``entry`` for this cause."""
        if pending is None:
            name = entry.name or entry.request.name or entry.request.kind.label + ".noname"
            pending = Pending(entry.request.kind.label, name, (self.rank,), (), {self.rank: entry.site})
        return AbortedError(pending, cause, entry.request.process_set, entry.epoch)

    # -- the coordinator's messages -------------------------------------------------------------------------------

    def handle(self, message: m.Message, now: int) -> list[Effect]:
        """Take in a message at ``now`` (nanoseconds); what belongs to an ended epoch has no effect."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return []
        effects = handler(message)
        for effect in effects:
            if type(effect) is RunBatch:
                for entry in effect.entries:
                    entry.received = now
                    entry.submitted = entry.submitted or now  # what this rank has not submitted itself
        return effects

    def _on_execute(self, message: m.Execute) -> list[Effect]:
        group = self.sets.get(message.process_set)
        if group is None or message.epoch != group.epoch or group.withdrawn == group.epoch:
            return []  # an abort of this epoch is on its way
        effects: list[Effect] = []
        by_id = self._by_id
        for number, batch in enumerate(message.batches):
            entries = []
            for id in batch.locals:
                entry = by_id[id].queue.popleft() if id >= 0 else self._take_part(group, batch.zeros[-1 - id])
                entry.phase = EXECUTING
                entries.append(entry)
            kind = entries[0].request.kind
            if kind is OpKind.ADD_PROCESS_SET or kind is OpKind.REMOVE_PROCESS_SET:
                for entry in entries:
                    self._end(entry)
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
                    )
                )
        return effects

    def _take_part(self, group: SetState, signature: m.Signature) -> Entry:
        """This rank has joined; what others do is done here with zeros."""
        entry = Zeros(group.id, signature)
        entry.epoch = group.epoch
        group.pending[entry] = None
        return entry

    def _heads(self, set_id: int, epoch: int, locals: tuple[int, ...]) -> list[Entry]:
        group = self.sets.get(set_id)
        if group is None or epoch != group.epoch:
            return []
        entries = []
        for id in locals:
            local = self._by_id.get(id)
            if local is not None and local.queue:
                entry = local.queue.popleft()
                self._end(entry)
                entries.append(entry)
        return entries

    def _on_reject(self, message: m.Reject) -> list[Effect]:
        parties = [Disagreement(p.ranks, p.request, p.site) for p in message.parties]
        return [
            Fail(entry, MismatchError(message.name, message.process_set, parties))
            for entry in self._heads(message.process_set, message.epoch, message.locals)
        ]

    def _on_reject_duplicate(self, message: m.RejectDuplicate) -> list[Effect]:
        return [
            Fail(entry, DuplicateNameError(message.name, message.first_site, message.second_site))
            for entry in self._heads(message.process_set, message.epoch, message.locals)
        ]

    def _on_decline(self, message: m.Decline) -> list[Effect]:
        def error() -> Exception:
            if message.joined:
                return JoinedRanksError(message.name, message.process_set, message.joined, message.reason)
            return InvalidRequestError(message.reason)

        return [
            Fail(entry, error()) for entry in self._heads(message.process_set, message.epoch, message.locals)
        ]

    def _on_abort(self, message: m.Abort) -> list[Effect]:
        group = self.sets.get(message.process_set)
        if group is None or message.epoch < group.epoch:
            return []
        cause = Cause(CauseKind(message.kind), message.ranks, message.text, message.site)
        if self.elastic and group.id == 0:
            # Others know that this attempt has failed; what this rank would still submit is of the past.
            self.failure = cause
        known = {
            (c.kind, c.name): Pending(
                OpKind(c.kind).label, c.name, c.waited, c.missing, dict(zip(c.waited, c.sites, strict=False))
            )
            for c in message.pending
        }
        self._drop_outbox(group.id)
        effects: list[Effect] = [AbortPlane(group.id, message.epoch)]
        effects += self._fail_all(
            group,
            lambda entry: self.aborted(entry, cause, known.get((int(entry.request.kind), entry.name))),
            message.epoch,
        )
        group.epoch = message.epoch
        group.configured, group.withdrawn = False, -1
        return effects

    def _drop_outbox(self, set_id: int) -> None:
        """Announcements that were not sent are not needed; definitions in them have not been sent either."""
        self._outbox.pop(set_id, None)

    def _on_configure(self, message: m.Configure) -> list[Effect]:
        group = self.sets.get(message.process_set)
        if group is None:
            group = self.sets[message.process_set] = SetState(message.process_set)
        elif message.epoch < group.epoch:
            return []
        ranks = tuple(member.rank for member in message.members)
        group.epoch, group.members, group.ranks = message.epoch, message.members, ranks
        group.index = ranks.index(self.rank) if self.rank in ranks else -1
        group.plane, group.options = message.plane, message.options
        group.configured, group.withdrawn = True, -1
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
            ),
        ]
        waiting = [entry for entry in group.pending if entry.phase != EXECUTING]
        if group.given_up is not None and any(entry.given_up for entry in waiting):
            # Others wait for these: the epoch ends at once, and what came later is for the one after it.
            for entry in waiting:
                entry.epoch = group.epoch + (not entry.given_up)
            self._end_epoch(group, group.given_up)
        else:
            group.given_up = None
            effects += self._announce_again(group)
        return effects

    def _announce_again(self, group: SetState) -> list[Effect]:
        """What is pending and not executing belongs to the new epoch; it may no longer fit its members."""
        effects: list[Effect] = []
        self._drop_outbox(group.id)
        for entry in list(group.pending):
            if entry.phase == EXECUTING:
                continue
            self._unqueue(entry)
            entry.phase = HELD
            try:
                if group.index < 0:
                    raise InvalidRequestError(f"Rank {self.rank} is no longer in process set {group.id}.")
                self._check(group, entry)
            except InvalidRequestError as error:
                self._end(entry)
                effects.append(Fail(entry, error))
            else:
                entry.epoch = group.epoch
                self._queue(entry)
        return effects

    def _on_dissolve(self, message: m.Dissolve) -> list[Effect]:
        group = self.sets.pop(message.process_set, None)
        if group is None:
            return []
        cause = Cause(CauseKind.MEMBERSHIP, (), f"process set {group.id} was removed")
        self._drop_outbox(group.id)
        effects = self._fail_all(group, lambda entry: self.aborted(entry, cause))
        if effects:
            effects.insert(0, AbortPlane(group.id, group.epoch))
        effects.append(ClosePlanes(group.id, group.epoch + 1))
        return effects

    def _on_process_set_added(self, message: m.ProcessSetAdded) -> list[Effect]:
        local = self._by_id.get(message.local)
        if local is None or not local.queue:
            return []
        entry = local.queue.popleft()
        self._end(entry)
        return [Succeed(entry, message.process_set)]

    # -- elastic training -----------------------------------------------------------------------------------------

    def train(self, on: bool) -> None:
        """Elastic training begins or ends."""
        self.elastic, self.failure = on, None
        if self.lost is None:
            self._messages.append(m.Elastic(on))

    def _on_regrouped(self, message: m.Regrouped) -> list[Effect]:
        self.failure = None
        return []

    # -- checks ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert what must hold between calls."""
        ids = [local.id for local in self._locals.values()]
        assert len(ids) == len(set(ids)), "an id stands for two things"
        for local in self._locals.values():
            assert self._by_id[local.id] is local
            for entry in local.queue:
                assert entry.phase == ANNOUNCED, entry.phase
                assert entry in self.sets[entry.request.process_set].pending
        for group in self.sets.values():
            for entry in group.pending:
                assert entry.phase != ENDED
                if entry.phase == ANNOUNCED and group.withdrawn < 0:
                    assert entry in entry.local.queue
            for name, entry in group.names.items():
                assert entry in group.pending
                assert entry.name == name
        assert len(self._locals) <= max(self._limit, self._next)


def _splits(splits: tuple[int, ...] | None, rows: int, members: int) -> tuple[int, ...]:
    if splits is None:
        if members and rows % members:
            raise InvalidRequestError(
                f"alltoall without splits needs a first dimension that {members} members divide, not {rows}; give splits."
            )
        return (rows // members,) * members if members else ()
    if members and len(splits) != members:
        raise InvalidRequestError(f"alltoall needs one split per member ({members}), not {len(splits)}.")
    if any(rows_to < 0 for rows_to in splits) or sum(splits) != rows:
        raise InvalidRequestError(
            f"alltoall's splits {list(splits)} must be positive and add up to {rows} rows."
        )
    return splits

"""Rank's view of the world: its members, the wait until it is complete, and the rank's part in elastic training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from hvdlab.collectives.engine.locked_state import LockedState
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.errors import ReleasedError, StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.text import LOG, compact_ranks, format_ranks, visible


class WorldView:
    """View of the world: its expected ranks, and its present ones. Written by the control thread, read by any.

    Attributes:
        last: The coordinator's last message about the world, or ``None``.
        first_generation: The generation with which the world began, or began again after an abort; 0 before. Equal on all members that were
            there, however soon an orderly change follows.
        watchers: Called on the control thread with each such message.
    """

    def __init__(self) -> None:
        #: Guards the attributes below, and wakes waits when they change.
        self._changed = threading.Condition()
        #: Members of the world in ``_generation``.
        self._members: frozenset[int] = frozenset()
        self._generation = self.first_generation = 0
        #: Why the coordinator is gone for good, or ``None``.
        self._lost: str | None = None
        #: Ranks that elastic training has let in.
        self._let_in: set[int] = set()
        #: Ticket of the last answered ``Regroup``.
        self._regrouped = 0
        #: Why the coordinator has dismissed this rank, or ``None``.
        self._released: str | None = None
        self.last: m.World | None = None
        self.watchers: list[Callable[[m.World], None]] = []

    def update(self, message: m.Message) -> None:
        assert isinstance(message, m.World)
        if message.restoring:
            return  # a rank that is on its way to the new coordinator does not count as missing
        with self._changed:
            self.last = message
            self._changed.notify_all()
        # Without the lock: a watcher can call the methods above and below.
        for watcher in tuple(self.watchers):
            watcher(message)

    def configured(self, ranks: Sequence[int], generation: int) -> None:
        """Keep the members of the world in this generation."""
        with self._changed:
            # Before the next World message, which has them no longer among those that wait.
            self._let_in.update(set(ranks) & set(self.waiting))
            # In this order: `alive` reads the generation first, without the lock, and then finds members that
            # are as new.
            self._members, self._generation = frozenset(ranks), generation
            self.first_generation = self.first_generation or generation
            self._changed.notify_all()

    def aborted(self) -> None:
        """Note that a generation was aborted, or its coordinator lost: the values of all generations up to it are gone."""
        self.first_generation = 0

    def released(self, reason: str) -> None:
        """Wake waits, since the coordinator has asked this rank to leave."""
        with self._changed:
            self._released = reason
            self._changed.notify_all()

    def regrouped(self, ticket: int) -> None:
        """Wake the wait for a restart of elastic training; ``ticket`` is that of this rank's ``Regroup``."""
        with self._changed:
            self._regrouped = ticket
            self._changed.notify_all()

    def wait_regrouped(self, ticket: int, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the answer to a :class:`~hvdlab.collectives.protocol.messages.Regroup`. Return whether it came.

        Raises:
            StartError: The coordinator is lost.
            ReleasedError: This rank was released.
        """

        def answered() -> bool:
            return self._regrouped == ticket or self._lost is not None or self._released is not None

        with self._changed:
            self._changed.wait_for(answered, timeout)
            if self._released is not None:
                raise ReleasedError(self._released)
            if self._lost is not None:
                raise StartError(self._lost)
            return self._regrouped == ticket

    @property
    def alive(self) -> tuple[int, ...]:
        """Return the ranks that live, as far as this rank knows.

        The coordinator sends ``World`` messages now and then only, so the members of a newer generation can be more recent. A
        successor of the coordinator continues without ranks that no rank reports as alive.
        """
        last = self.last
        if last is None:
            return tuple(sorted(self._members))
        members = {member.rank for member in last.members}
        return tuple(sorted(members | self._members if self._generation > last.generation else members))

    def lost(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def _missing(self) -> frozenset[int]:
        if self.last is None:
            return frozenset()
        # A world that lost a rank continues without it, also after a restart.
        lost = {death.rank for death in self.last.deaths if death.admitted}
        return frozenset(self.last.expected) - self._members - lost

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the ranks that wait until elastic training admits them."""
        return self.last.waiting if self.last is not None else ()

    @property
    def leaving(self) -> tuple[int, ...]:
        """Return the ranks that are dismissed at the next reset point of elastic training."""
        return self.last.leaving if self.last is not None else ()

    def _others(self, rank: int) -> set[int]:
        return {member.rank for member in self.last.members} - {rank} if self.last is not None else set()

    def _dead(self) -> list[m.Death]:
        """Return the deaths of ranks that are missing and never were members: no other process will come in their place."""
        if self.last is None:
            return []
        missing = self._missing()
        return [death for death in self.last.deaths if death.rank in missing]

    def wait_complete(self, timeout: float, rank: int, door: float = 0.0, size: int = 0) -> None:
        """Wait until every expected rank is a member.

        Args:
            timeout: Seconds to wait.
            rank: This rank.
            door: Seconds to wait instead, if it is more, while this rank waits until elastic training admits it.
            size: Number of expected ranks. A world of fewer is not complete before the coordinator has named its ranks.

        Raises:
            StartError: Ranks are missing or dead; the text names them.
            ReleasedError: This rank was dismissed before.
        """

        def complete() -> bool:
            # Before the coordinator's first message this rank does not know which ranks are expected. A rank whose peers had ended by then
            # would take itself for the whole world.
            known = self.last is not None or len(self._members) >= max(size, 1)
            # Elastic training continues without missing ranks, and lets them in later.
            training = self.last is not None and self.last.training and rank in self._members
            return known and bool(self._members) and (rank in self._let_in or training or not self._missing())

        def settled() -> bool:
            ended = self._lost is not None or self._released is not None
            return complete() or ended or (rank not in self.waiting and bool(self._dead()))

        with self._changed:
            self._changed.wait_for(settled, timeout)
            # Only now: whether this rank waits for admission is known once the coordinator has named the ranks that do.
            at_door = rank in self.waiting
            if at_door:
                self._changed.wait_for(settled, max(0.0, door - timeout))
            came, missing, dead = complete(), sorted(self._missing()), self._dead()
            # No rank is a member before all are there: leave out those that have come and wait as well.
            missing = [r for r in missing if r != rank and r not in self._others(rank)] or missing
        if self._lost is not None:
            raise StartError(self._lost)
        if came:
            return
        if self._released is not None:
            raise ReleasedError(self._released)
        if dead and not at_door:
            deaths = "; ".join(
                f"rank {death.rank} ended before the world was complete: {death.reason}" for death in dead
            )
            raise StartError(f"{deaths}. Look at its output, then start the group again.")
        if at_door:
            raise StartError(
                f"rank {rank} waited {max(door, timeout):g} s for {format_ranks(sorted(self._others(rank)))} to let it "
                "in: they train, and did not get to a commit() of their state. Raise HOROVOD_ELASTIC_TIMEOUT."
            )
        who = format_ranks(missing) if missing else "the coordinator's go-ahead"
        raise StartError(
            f"rank {rank} waited {timeout:g} s for the world: {who} did not come. Look at the output of the "
            "missing ranks, or raise HVDLAB_START_TIMEOUT."
        )


class ElasticMembership:
    """Membership of this rank in elastic training: it reports reset points to the coordinator and waits for the other ranks.

    Args:
        rank: This rank.
        locked: Its state.
        world: Its view of the world.
    """

    def __init__(self, rank: int, locked: LockedState, world: WorldView) -> None:
        self._rank = rank
        self._locked = locked
        self._world = world
        #: Number of the last ``Regroup`` that was sent.
        self._ticket = 0
        #: The trainings under way, which can be nested.
        self._trainings: set[object] = set()
        #: Guards ``_trainings``.
        self._lock = threading.Lock()

    def begin(self, training: object) -> None:
        """Begin this training: from now on newcomers wait for a reset point, and a failure fails all later submissions.

        Once the world's generation was aborted, each submission of this rank fails with the same cause, until all ranks restart. Other
        ranks have perhaps restored their last commit by then, and must not meet later submissions of this rank. Can be nested.
        """
        with self._lock:
            self._trainings.add(training)
            if len(self._trainings) > 1:
                return
        self._locked.update(RankState.set_elastic, True)

    def end(self, training: object) -> None:
        """End this training, after success or failure. Can be called again, as by a thread that was interrupted in it."""
        with self._lock:
            self._trainings.discard(training)
            if self._trainings:
                return
        self._locked.update(RankState.set_elastic, False)

    def stop(self, reason: str = "", at_least: int = 1) -> None:
        """Report that this rank has reached a reset point. Collectives in which other ranks wait for it fail with the reason.

        Does not wait; see :meth:`wait`.

        Args:
            reason: Failure that brought this rank here; empty without one.
            at_least: Ranks that are needed to continue.
        """
        self._ticket += 1
        message = m.Regroup(self._ticket, at_least, reason)
        self._locked.update(RankState.reached_reset, message)

    def wait(self, timeout: float) -> None:
        """Wait after :meth:`stop` until all living ranks have come, newcomers are admitted, and there are enough ranks.

        Raises:
            StartError: That did not happen within ``timeout`` seconds, or the coordinator is lost.
            ReleasedError: This rank was dismissed: the others restart without it.
        """
        if self._world.wait_regrouped(self._ticket, timeout):
            return
        last = self._world.last
        alive = sorted(member.rank for member in last.members) if last is not None else []
        raise StartError(
            f"rank {self._rank} waited {timeout:g} s to begin again: {format_ranks(alive)} are alive, but there are not "
            "enough of them (HVDLAB_MIN_NP), or some did not come back to their last commit. Raise "
            "HOROVOD_ELASTIC_TIMEOUT, or look at what they do."
        )

    @property
    def training(self) -> bool:
        """Return whether this rank is in elastic training."""
        with self._lock:
            return bool(self._trainings)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Return the ranks that leave at the next reset point."""
        return self._world.leaving

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the ranks that wait for admission."""
        return self._world.waiting

    def watch(self, callback: Callable[[tuple[int, ...], tuple[int, ...]], None]) -> Callable[[], None]:
        """Call ``callback(waiting, leaving)`` on the control thread whenever the world has changed.

        Args:
            callback: Gets the ranks that wait for admission, and those that leave.

        Returns:
            A function that ends the calls.
        """

        def watcher(world: m.World) -> None:
            callback(world.waiting, world.leaving)

        self._world.watchers.append(watcher)
        return lambda: self._world.watchers.remove(watcher)


# -- log ---------------------------------------------------------------------------------------------------------------


def log_generation(rank: int, message: m.Configure) -> None:
    """Log the new generation of a process set."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    ranks = compact_ranks([member.rank for member in message.members])
    LOG.info(
        "rank %d: %s, generation %d: ranks %s, plane %s",
        rank,
        _set_in_words(message.process_set),
        message.generation,
        ranks,
        visible(message.plane),
    )
    note = message.options.get("note")
    if note:
        LOG.info("rank %d: %s", rank, visible(note))


def log_abort(rank: int, message: m.Abort) -> None:
    """Log the end of a generation; calls that wait for its collectives raise an error with the same text."""
    LOG.info(
        "rank %d: %s, generation %d ended (%s): %s",
        rank,
        _set_in_words(message.process_set),
        message.generation,
        visible(message.kind),
        visible(message.text),
    )


def log_loss(rank: int, reason: str) -> None:
    """Log the loss of the coordinator; every collective that waits, or is submitted later, raises an error with this reason."""
    LOG.info("rank %d: %s", rank, visible(reason))


def _set_in_words(process_set: int) -> str:
    return f"process set {process_set}" if process_set else "world"

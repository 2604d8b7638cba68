"""Decision log: the coordinator's newest decisions, each with the number of the entry that led to it.

An entry is a decision, or an incoming event that led to one. The log has as many as :data:`KEPT`, so that it never grows. Events that lead
to no decision leave no entry, and neither does an order: each generation of a process set has one entry, which counts its orders, and they
carry its number. So a healthy job, with generations that last, writes nothing here.

::

    17  lost connection  rank 2  reason: end of file
    18  died             rank 2  reason: end of file                                   caused by 17
    19  aborted          process set 0, generation 1, `loss`  cause: rank_died         caused by 18
    20  began            process set 0, generation 2, ranks 0-1  plane: shm            caused by 19
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol

from hvdlab.collectives.coordinator.events import Event, PeerConnected, PeerLost, Received
from hvdlab.collectives.protocol.messages import Decision, Recall, Resume, StoryRequest
from hvdlab.collectives.text import format_ranks

KEPT = 1024
"""Entries that are kept. One has some hundred bytes, so that all of them need less than a megabyte."""

LONGEST_FACT = 300
"""Characters of a text that are kept: ranks choose some of them."""

MOST_NAMES = 8
"""Names of tensors that an entry has at most: an abort can end thousands of collectives."""

STORY_OF_ERROR = 8
"""Decisions in the notes of a broken invariant, apart from their causes."""

_REASONS = ("reason", "kind", "text", "cell", "error", "first_site", "second_site")
"""Fields of messages with the reason for which they were sent."""


class DecisionKind(StrEnum):
    """Kinds of entries: incoming events first, then decisions."""

    CONNECTED = "connected"
    LOST_CONNECTION = "lost connection"
    RECEIVED = "received"
    TIME_PASSED = "time passed"
    RESUMED = "resumed"

    REFUSED = "refused"
    RETURNED = "returned"
    DIED = "died"
    LEFT = "left"
    ADMITTED = "admitted"
    RESIZED = "resized"
    RELEASED = "released"
    BEGAN = "began"
    ABORTED = "aborted"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    REMOVED = "removed"
    TOOK_OVER = "took over"


class DecisionEntry:
    """Decision of a part of the coordinator's state, for the decision log. The state adds it there, which gives it its number.

    Args:
        kind: Its kind.
        cause: Number of the entry that led to it; 0 for the event that is being handled.
        process_set, generation: The process set that it is about, or -1, and its generation.
        names: The tensors that it is about; the first :data:`MOST_NAMES` are kept.
        ranks: The ranks that it is about.
        facts: Its other fields; empty ones are left out.

    Attributes:
        number: Its number; 0 until it is in the log.
    """

    __slots__ = ("cause", "facts", "generation", "kind", "names", "number", "process_set", "ranks")

    def __init__(
        self,
        kind: DecisionKind,
        *,
        cause: int = 0,
        process_set: int = -1,
        generation: int = 0,
        names: Iterable[str] = (),
        ranks: Iterable[int] = (),
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.cause = cause
        self.process_set, self.generation = process_set, generation
        self.names, self.ranks = names, ranks
        self.facts = facts
        self.number = 0


class Amendment(NamedTuple):
    """Facts to add to an entry of the decision log, as far as it is still kept."""

    number: int
    facts: Mapping[str, str]


class Sender(Protocol):
    """Sender of an event: a rank."""

    @property
    def rank(self) -> int: ...


class DecisionLog:
    """Ring of the newest decisions, and of the events that led to them.

    Args:
        wall_offset: Seconds to add to monotonic ones for those since 1970.
        first: Number of the first entry; those of each coordinator are above those of the ones before.
        kept: Entries that are kept.

    Attributes:
        now: Time of the present batch of events, in monotonic seconds.
    """

    def __init__(self, wall_offset: float, first: int = 1, kept: int = KEPT) -> None:
        self.now = 0.0
        self._wall_offset = wall_offset
        self._first = first
        #: Number of the next entry.
        self._next = first
        #: The newest entries, in order of their numbers, without gaps.
        self._entries: deque[Decision] = deque(maxlen=kept)
        #: The event that is being handled.
        self._event: Event | None = None
        #: The rank that it came from.
        self._sender: Sender | None = None
        #: Its entry; 0 as long as it has none.
        self._event_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def dropped(self) -> int:
        """Return the number of entries that have made room for newer ones."""
        return self._next - self._first - len(self._entries)

    def handling(self, event: Event, sender: Sender | None) -> None:
        """Make ``event`` the cause of the decisions that come next; it gets an entry with the first of them.

        Args:
            event: The event.
            sender: The rank that it came from, if it came from one.
        """
        # By identity: the last event of a batch comes here again at its end, and must not get a second entry.
        if event is not self._event:
            self._event, self._sender, self._event_number = event, sender, 0

    def add_event(self) -> None:
        """Add the entry of the event that is being handled now, whether or not a decision follows."""
        self._cause()

    def add(self, entry: DecisionEntry) -> int:
        """Add a decision, set its number and return it."""
        cause = entry.cause or self._cause()
        facts = {key: _shortened(text) for key, text in (entry.facts or {}).items() if text}
        names = tuple(_shortened(name) for name in tuple(entry.names)[:MOST_NAMES])
        about = entry.process_set, entry.generation
        entry.number = self._append(entry.kind, cause, *about, names, tuple(entry.ranks), facts)
        return entry.number

    def amend(self, number: int, facts: Mapping[str, str]) -> None:
        """Add facts to an entry, as far as it is still kept."""
        # Numbers are consecutive, so that the place of an entry follows from its number.
        place = number - (self._next - len(self._entries))
        if 0 <= place < len(self._entries):
            old = self._entries[place]
            self._entries[place] = Decision(
                old.number, old.when, old.kind, old.cause, old.process_set, old.generation, old.names, old.ranks, {**old.facts, **facts}
            )  # fmt: skip

    def _append(
        self,
        kind: DecisionKind,
        cause: int,
        process_set: int,
        generation: int,
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        facts: dict[str, str],
    ) -> int:
        number, self._next = self._next, self._next + 1
        when = self.now + self._wall_offset
        self._entries.append(
            Decision(number, when, kind.value, cause, process_set, generation, names, ranks, facts)
        )
        return number

    def _cause(self) -> int:
        """Return the number of the event that is being handled, and add its entry if it has none yet; 0 without an event."""
        event, sender = self._event, self._sender
        if event is None or self._event_number:
            return self._event_number
        kind, facts = _described(event)
        ranks = () if sender is None else (sender.rank,)
        if isinstance(event, PeerConnected) and event.hello.rank >= 0:
            ranks = (event.hello.rank,)
        self._event_number = self._append(kind, 0, -1, 0, (), ranks, facts)
        return self._event_number

    # -- stories --------------------------------------------------------------------------------------------------

    def story(self, asked: StoryRequest) -> tuple[Decision, ...]:
        """Return the newest entries that a request asks for and the entries that led to them, oldest first."""
        chosen = [entry for entry in self._entries if _is_about(entry, asked)]
        # Not with 0, since a slice that begins at -0 is the whole list; a peer can send any number.
        found = {entry.number: entry for entry in chosen[-max(asked.last, 0) :] if asked.last > 0}
        by_number = {entry.number: entry for entry in self._entries}
        # A copy, as causes are added to it; the causes of these are found by the inner loop.
        for entry in list(found.values()):
            # A cause can be older than the oldest entry that is kept; the story begins behind it then.
            while (cause := by_number.get(entry.cause)) is not None and cause.number not in found:
                found[cause.number] = entry = cause
        return tuple(found[number] for number in sorted(found))

    def add_story_to(self, error: AssertionError) -> None:
        """Add the story of the rank, tensor or process set that a broken invariant is about to its notes; the newest one if it is not known."""
        about = subject_of_error(error)
        process_set = about.process_set if about.rank < 0 else -1
        asked = StoryRequest(0, STORY_OF_ERROR, about.rank, about.name, process_set)
        for entry in self.story(asked) or self.story(StoryRequest(0, STORY_OF_ERROR)):
            error.add_note(f"decision {line_of(entry)}")


def line_of(entry: Decision) -> str:
    """Return an entry as one line; some texts in it come from peers."""
    about = subject_of(entry)
    facts = ", ".join(f"{key}: {text}" for key, text in entry.facts.items())
    cause = f" (caused by {entry.cause})" if entry.cause else ""
    parts = [part for part in (about, facts) if part]
    return f"{entry.number} {entry.kind} " + "; ".join(parts) + cause


def subject_of(entry: Decision) -> str:
    """Return the process set, tensors and ranks that an entry is about, in words."""
    parts = []
    if entry.process_set >= 0:
        parts.append(
            f"process set {entry.process_set}"
            + (f", generation {entry.generation}" if entry.generation else "")
        )
    if entry.names:
        parts.append(", ".join(f"`{name}`" for name in entry.names))
    if entry.ranks:
        parts.append(format_ranks(entry.ranks))
    return ", ".join(parts)


def _is_about(entry: Decision, asked: StoryRequest) -> bool:
    return (
        (asked.rank < 0 or asked.rank in entry.ranks)
        # Entries keep long names shortened, so the name of the request is cut in the same way.
        and (not asked.name or _shortened(asked.name) in entry.names)
        and (asked.process_set < 0 or asked.process_set == entry.process_set)
        and (not asked.decision or asked.decision == entry.number)
    )


def _described(event: Event) -> tuple[DecisionKind, dict[str, str]]:
    """Return an event's kind, and those of its fields that explain it."""
    if isinstance(event, Received) and isinstance(event.message, Resume):
        return DecisionKind.RESUMED, _of_resume(event.message)
    if isinstance(event, Received) and isinstance(event.message, Recall):
        return DecisionKind.RESUMED, _of_recall(event.message)
    if isinstance(event, Received):
        message = event.message
        reasons = {field: str(getattr(message, field, "")) for field in _REASONS}
        facts = {"message": type(message).__name__} | reasons
        return DecisionKind.RECEIVED, {key: _shortened(text) for key, text in facts.items() if text}
    if isinstance(event, PeerConnected):
        hello = event.hello
        facts = {"role": hello.role, "pid": str(hello.pid), "host": _shortened(hello.host)}
        return DecisionKind.CONNECTED, facts
    if isinstance(event, PeerLost):
        return DecisionKind.LOST_CONNECTION, {"reason": _shortened(event.reason)}
    return DecisionKind.TIME_PASSED, {}


def _of_resume(message: Resume) -> dict[str, str]:
    """Return the facts that a rank sends to a successor of its coordinator."""
    sets = ", ".join(f"{known.id} (generation {known.generation})" for known in message.sets)
    facts = {"process sets": sets, "cells": ", ".join(message.cells)}
    facts["elastic"] = "in training" if message.elastic else ""
    return {key: _shortened(text) for key, text in facts.items() if text}


def _of_recall(message: Recall) -> dict[str, str]:
    """Return the facts that a client sends to a successor of its coordinator."""
    facts = {
        "expected": format_ranks(message.expected) if message.expected else "",
        "alive": format_ranks([member.rank for member in message.members]) if message.members else "",
        "dead": format_ranks([death.rank for death in message.deaths]) if message.deaths else "",
        "cells": ", ".join(cell for cell, _ in message.cells),
    }
    return {key: _shortened(text) for key, text in facts.items() if text}


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_FACT else text[: LONGEST_FACT - 1] + "…"


class InvariantSubject(NamedTuple):
    """Subject of a broken invariant: a process set, a tensor's name or a rank, as far as it is about one."""

    process_set: int = -1
    name: str = ""
    rank: int = -1


class InvariantOf:
    """Context manager that names the subject of the invariants which are asserted in its block.

    An ``AssertionError`` leaves it with the subject as its attribute ``subject``; the innermost one counts.
    """

    __slots__ = ("_subject",)

    def __init__(self, *, process_set: int = -1, name: str = "", rank: int = -1) -> None:
        self._subject = InvariantSubject(process_set, name, rank)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AssertionError):
            add_subject(error, self._subject)


def add_subject(error: AssertionError, subject: InvariantSubject) -> None:
    """Add the subject, to the parts of it that are known already."""
    known = subject_of_error(error)
    error.subject = InvariantSubject(  # type: ignore[attr-defined]  # an attribute of this instance
        known.process_set if known.process_set >= 0 else subject.process_set,
        known.name or subject.name,
        known.rank if known.rank >= 0 else subject.rank,
    )


def subject_of_error(error: AssertionError) -> InvariantSubject:
    """Return the subject of a broken invariant; one without any part if it is not known."""
    found: InvariantSubject = getattr(error, "subject", InvariantSubject())
    return found

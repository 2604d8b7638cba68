"""Receives from any source: which rank's message a receive without a source gets.

The core matches a send only with a receive that names its source. So a rank that receives from any source asks the members to
report from then on how many messages with this tag they have sent to it. Its receive then names a rank that has sent more messages
than this rank has received from it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, HvdlabError, Pending
from hvdlab.torch.c10d.work import Deliver, HvdlabWork, futures_threads
from hvdlab.torch.compiling import untraced_methods

_COUNT = "c10d.any_source"
_AT_ONCE = 0.02
"""Seconds within which most messages come; only a longer wait is announced to the coordinator."""
_SAID_AFTER = 10.0
"""Seconds after which a receive that waits for any rank prints a line; it then prints one each time they have passed again."""


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """Mail between ranks: how many messages of a group with this tag the sender has sent to the receiver, as ``count``.

    With ``asks``, a request to the receiver to report this, now and with each further message.
    """

    group: str
    tag: int
    count: int = 0
    asks: bool = False


class Counts:
    """What one rank knows of the messages of one group: how many it sent, and how many there are for it.

    Sources and targets are ranks of the world. :class:`AnySource` holds its lock around each use.
    """

    def __init__(self) -> None:
        #: Messages that this rank sent, by target and tag.
        self.sent: Counter[tuple[int, int]] = Counter()
        #: The ranks that have asked for reports of messages to them, with the tag.
        self.asked: set[tuple[int, int]] = set()
        #: Receives that were submitted here, by source and tag.
        self.received: Counter[tuple[int, int]] = Counter()
        #: How many messages other ranks have reported to have sent to this rank, by source and tag.
        self.offered: dict[tuple[int, int], int] = {}
        #: Receives from any source whose source is not known yet, by tag, the oldest first.
        self.waiting: dict[int, deque[AnySourceWork]] = {}
        #: Tags for which this rank has asked all members to report.
        self.asks: set[int] = set()

    def match(self) -> list[tuple[AnySourceWork, int]]:
        """Find sources for waiting receives, the lowest of the ranks that have sent; returns the receives with their sources."""
        found = []
        for tag, waiting in self.waiting.items():
            while waiting:
                ready = [
                    source
                    for (source, of_tag), count in sorted(self.offered.items())
                    if of_tag == tag and count > self.received[source, tag]
                ]
                if not ready:
                    break
                self.received[ready[0], tag] += 1
                found.append((waiting.popleft(), ready[0]))
        return found


class AnySource:
    """The counts of all groups of this rank. One object for each engine.

    Args:
        engine: The rank's engine.

    Attributes:
        changed: Guards everything here, and wakes the receives that wait for a source.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.changed = threading.Condition()
        self._groups: dict[str, Counts] = {}
        #: Receives whose source is known, and whether a thread is submitting them.
        self._matched: deque[tuple[AnySourceWork, int]] = deque()
        self._submitting = False
        engine.on_mail(_COUNT, self._on_mail)
        engine.on_world(self._on_world)

    def _counts(self, group: str) -> Counts:
        return self._groups.setdefault(group, Counts())

    def sends(self, group: str, target: int, tag: int, change: int = 1) -> None:
        """Count a message that this rank has submitted to ``target``; with -1 as ``change``, discount one that failed."""
        with self.changed:
            counts = self._counts(group)
            counts.sent[target, tag] += change
            if (target, tag) in counts.asked:
                self._say(group, target, tag)

    def receives(self, group: str, source: int, tag: int, change: int = 1) -> None:
        """Count a receive of a message from ``source``; with -1 as ``change``, discount one that failed."""
        with self.changed:
            self._counts(group).received[source, tag] += change

    def add(self, group: str, members: Sequence[int], tag: int, work: AnySourceWork) -> None:
        """Register a receive from any member, which is submitted as soon as a member has sent a message."""
        with self.changed:
            counts = self._counts(group)
            counts.waiting.setdefault(tag, deque()).append(work)
            if tag not in counts.asks:
                counts.asks.add(tag)
                others = [member for member in members if member != self._engine.rank]
                self._engine.post(_COUNT, msgspec.msgpack.encode(Sent(group, tag, asks=True)), others)
            self._match(counts)

    def remove(self, group: str, tag: int, work: AnySourceWork) -> bool:
        """Withdraw a receive. Returns whether its source was not known yet; otherwise it goes on."""
        with self.changed:
            waiting = self._counts(group).waiting.get(tag, deque())
            if work in waiting:
                waiting.remove(work)
                return True
            return False

    def waits(self, group: str, tag: int, work: AnySourceWork) -> bool:
        """Whether a receive's source is not known yet."""
        with self.changed:
            return work in self._counts(group).waiting.get(tag, ())

    def _match(self, counts: Counts) -> None:
        for work, source in counts.match():
            self._matched.append((work, source))
        if self._matched and not self._submitting:
            # On another thread: submitting may execute the receive right away, and the control thread must not block on that.
            self._submitting = True
            futures_threads(os.getpid()).submit(self._submit_matched)

    def _submit_matched(self) -> None:
        """Submit the receives whose source is known. Only one thread runs this, so that receives are submitted in their order."""
        while True:
            with self.changed:
                if not self._matched:
                    self._submitting = False
                    return
                work, source = self._matched.popleft()
            work.begin(source)

    def _say(self, group: str, target: int, tag: int) -> None:
        said = Sent(group, tag, self._counts(group).sent[target, tag])
        self._engine.post(_COUNT, msgspec.msgpack.encode(said), [target])

    def _on_mail(self, sender: int, body: bytes) -> None:
        """Handle another rank's report, or its request for reports. Control thread."""
        said = msgspec.msgpack.decode(body, type=Sent)
        with self.changed:
            counts = self._counts(said.group)
            if said.asks:
                counts.asked.add((sender, said.tag))
                self._say(said.group, sender, said.tag)
            else:
                counts.offered[sender, said.tag] = said.count
                self._match(counts)

    def _on_world(self) -> None:
        with self.changed:
            self.changed.notify_all()


@untraced_methods
class AnySourceWork(HvdlabWork):
    """A receive from any rank, which is submitted once a rank has sent a message.

    Args:
        any_source: This rank's counts.
        group: The name by which counts know the group.
        members: The group's ranks, as ranks of the world.
        tag: The tag of the messages that it receives.
        submit: Submits the receive from a source, and fills this object.
        site: The user's line of code.
        args, kwargs: See :class:`HvdlabWork`.
    """

    def __init__(
        self,
        any_source: AnySource,
        group: str,
        members: Sequence[int],
        tag: int,
        submit: Callable[[AnySourceWork, int], None],
        site: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._any_source, self._group, self._members, self._tag = any_source, group, tuple(members), tag
        self._submit, self._site = submit, site
        #: Why no rank will send what it waits for; the control thread sets it when the coordinator says so.
        self._absent: Cause | None = None
        #: Whether it was submitted, or has failed before that.
        self._begun = False

    def set_source(self, deliver: Deliver | None, source: int) -> None:
        """Set the sender's rank in the group, and the function that copies the result to the user's tensor; before submitting."""
        self._deliver, self._source = deliver, source

    def begin(self, source: int) -> None:
        """Submit the receive from this rank, which has sent a message. Called on a thread of :func:`futures_threads`."""
        try:
            self._submit(self, source)
        except HvdlabError as error:
            self._error = error
        with self._any_source.changed:
            self._begun = True
            self._any_source.changed.notify_all()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        deadline = Deadline(timeout.total_seconds() if timeout.total_seconds() > 0 else self._seconds)
        try:
            self._wait_for_source(deadline)
        except BaseException:
            self._any_source.remove(self._group, self._tag, self)
            raise
        return super().wait(timedelta(seconds=max(deadline.remaining() or 0.0, 1e-3)))

    def _wait_for_source(self, deadline: Deadline) -> None:
        changed = self._any_source.changed
        with changed:
            if self._begun or changed.wait_for(lambda: self._begun, _AT_ONCE):
                return
        others = [member for member in self._members if member != self._engine.rank]
        what = f"recv from any rank with tag {self._tag}"
        number = self._engine.begin_await(others, what, self, any=True, site=self._site)
        try:
            self._wait_on(deadline)
        finally:
            self._engine.end_await(number)

    def still_waits(self) -> bool:
        """Whether its source is not known yet. Control thread."""
        return self._any_source.waits(self._group, self._tag, self)

    def in_vain(self, cause: Cause) -> None:
        """Fail the wait, since no rank will send any more; unless a source was found meanwhile. Control thread."""
        if self._any_source.remove(self._group, self._tag, self):
            with self._any_source.changed:
                self._absent = cause
                self._any_source.changed.notify_all()

    def _wait_on(self, deadline: Deadline) -> None:
        changed, said = self._any_source.changed, Deadline(_SAID_AFTER)
        with changed:
            while not self._begun:
                if self._absent is not None:
                    raise self._ended(self._absent.kind, self._absent.ranks, self._absent.text)
                lost = sorted(set(self._members) - set(self._engine.living))
                if lost:
                    raise self._ended(
                        CauseKind.RANK_DIED, lost, f"rank {lost[0]} is gone, which might have sent"
                    )
                if deadline.expired:
                    text = f"no rank has sent anything with tag {self._tag} within the timeout of the process group"
                    raise self._ended(CauseKind.TIMEOUT, [], text)
                if said.expired:
                    said = Deadline(_SAID_AFTER)
                    print(
                        f"{self.operation}: waits for any rank to send with tag {self._tag}", file=sys.stderr
                    )
                limits = [each for each in (deadline.remaining(), said.remaining()) if each is not None]
                changed.wait(min(limits))

    def _ended(self, kind: CauseKind, ranks: Sequence[int], text: str) -> AbortedError:
        self._error = AbortedError(
            Pending(self.operation, f"{self.operation}.noname"), Cause(kind, tuple(ranks), text)
        )
        self._begun = self._over = True
        return self._error

    def is_ended(self) -> bool:
        return self._begun and super().is_ended()

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._root = torch.futures.Future()
                self._future = self._root.then(self._value)
                futures_threads(os.getpid()).submit(self._wait_for_future)
            return self._future

    def _wait_for_future(self) -> None:
        try:
            self.wait()
        except HvdlabError:  # a wait that succeeds ends the future itself; _value() raises this error again
            self._end_future()

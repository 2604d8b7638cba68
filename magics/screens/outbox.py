"""Queue of a cell's messages to the notebook: in order, joined to few, and below the rate at which Jupyter's server drops messages.

The server counts the last three seconds, by default 3 MB and 3,000 messages, drops the excess, and starts counting afresh with
each cell. A burst passes at once; the rest waits here, and the flow-control window holds the ranks back that write it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hvdlab.collectives.time_limits import Clock
from hvdlab.magics.screens.publishers import OutputChannel

MESSAGE_CHARACTERS = 256 * 1024
"""Characters of one message at most."""
HURRIED_CHARACTERS = 300 * 1024
"""Characters of a backlog that are still shown after an interrupt."""


@dataclass(slots=True)
class _Message:
    """Text of a stream, or (without ``name``) another message."""

    name: str = ""
    texts: list[str] = field(default_factory=list)
    length: int = 0
    send: Callable[[], None] | None = None


class PacedOutbox:
    """Queue of messages, which sends them as soon as the rate limiter admits them.

    Text that waits is joined with text of the same stream. Only then, under a flood of more messages than the
    server accepts, may lines of stdout overtake lines of stderr.
    """

    def __init__(self, publisher: OutputChannel, clock: Clock) -> None:
        self._publisher, self._clock = publisher, clock
        self._limiter = RateLimiter(clock())
        self._waiting: deque[_Message] = deque()
        self._backlog = 0
        self._blocked_until = float("-inf")
        self._hurried = False
        self._skipped = 0

    @property
    def backlog(self) -> int:
        """Return the number of characters that wait."""
        return self._backlog

    def text(self, name: str, text: str) -> None:
        """Queue text of a stream."""
        for part in parts(text):
            message = self._open_message(name, len(part))
            if message is None:
                message = _Message(name)
                self._waiting.append(message)
            message.texts.append(part)
            message.length += len(part)
            self._backlog += len(part)
            self._shorten()
            self.tick(self._clock())

    def call(self, send: Callable[[], None]) -> None:
        """Queue another message: ``send`` is called when its turn comes."""
        self._waiting.append(_Message(send=send))
        self.tick(self._clock())

    def tick(self, now: float) -> float | None:
        """Send the admitted messages. Return the time of the next call, or None if nothing waits."""
        if now < self._blocked_until:
            return self._blocked_until
        while self._waiting:
            message = self._waiting[0]
            text = "".join(message.texts)
            size = wire_size(text) if message.send is None else ENVELOPE
            ready = self._limiter.ready_at(size, now)
            if ready > now:
                message.texts = [text]
                self._blocked_until = ready
                return ready
            self._limiter.admit(size, now)
            self._waiting.popleft()
            self._backlog -= message.length
            self._send_skipped()
            if message.send is not None:
                message.send()
            else:
                self._publisher.stream(message.name, text)
        return None

    def shorten(self) -> None:
        """Keep little from now on: the user has interrupted the cell."""
        self._hurried = True
        self._blocked_until = float("-inf")  # less is due now
        self._shorten()

    def _open_message(self, name: str, length: int) -> _Message | None:
        """Return a waiting message that text may join without overtaking anything but the other stream."""
        for message in reversed(self._waiting):
            if message.send is not None:
                return None
            if message.name == name:
                return message if message.length + length <= MESSAGE_CHARACTERS else None
        return None

    def _shorten(self) -> None:
        if not self._hurried or self._backlog <= HURRIED_CHARACTERS:
            return
        for message in self._waiting:
            if self._backlog <= HURRIED_CHARACTERS:
                return
            self._skipped += sum(text.count("\n") for text in message.texts)
            self._backlog -= message.length
            message.texts, message.length = [], 0

    def _send_skipped(self) -> None:
        if self._skipped:
            notice = f"({self._skipped} lines are not shown: the cell was interrupted)\n"
            self._skipped = 0
            self._publisher.stream("stderr", notice)


def parts(text: str) -> Iterator[str]:
    """Cut a text to the length of messages, at line ends where possible."""
    begin = 0
    while begin < len(text):
        end = begin + MESSAGE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end


WINDOW = 3.5
"""Seconds; longer than the server's, since messages may reach it closer together than they were sent."""

WINDOW_BYTES = 2_800_000
WINDOW_MESSAGES = 2_800
BURST_BYTES = 2_500_000
BYTES_PER_SECOND = 700_000
"""The rate after a burst, so that output flows instead of coming in one burst for each window."""

ENVELOPE = 1200
"""Bytes of a message besides its text, roughly."""


def wire_size(text: str) -> int:
    """Return the bytes of a stream message with this text."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) + ENVELOPE


class RateLimiter:
    """Rate limit for the messages of one cell. Times are in seconds of any clock."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._allowance = float(BURST_BYTES)
        self._sent: deque[tuple[float, int]] = deque()
        self._bytes = 0

    def admit(self, size: int, now: float) -> bool:
        """Return whether a message of ``size`` bytes may go now; if so it is counted."""
        if self.ready_at(size, now) > now:
            return False
        self._allowance -= size
        self._sent.append((now, size))
        self._bytes += size
        return True

    def ready_at(self, size: int, now: float) -> float:
        """Return the time at which a message of ``size`` bytes may go; ``now`` if it may at once."""
        self._pass(now)
        at = now
        missing = min(size, BURST_BYTES) - self._allowance
        if missing > 0:
            at = now + missing / BYTES_PER_SECOND + 0.001
        over = self._bytes + min(size, WINDOW_BYTES) - WINDOW_BYTES
        if len(self._sent) >= WINDOW_MESSAGES:
            at = max(at, self._sent[0][0] + WINDOW)
        for time, sent in self._sent:
            if over <= 0:
                break
            over -= sent
            at = max(at, time + WINDOW)
        return at

    def _pass(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._allowance = min(BURST_BYTES, self._allowance + passed * BYTES_PER_SECOND)
        while self._sent and self._sent[0][0] + WINDOW <= now:
            self._bytes -= self._sent.popleft()[1]

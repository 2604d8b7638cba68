"""Screens that show the merged output of a cell: a Jupyter notebook and a terminal.

A notebook's screen has the display areas of ranks' displays. It sends its messages through :class:`PacedOutbox`: in order, joined to few,
and below the rate at which Jupyter's server drops messages. The server counts the last three seconds, by default 3 MB and 3,000 messages,
drops the excess, and starts counting afresh with each cell. A burst passes at once; the rest waits in the outbox, and the flow-control
window holds the ranks back that write it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TextIO

from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Clock
from hvdlab.kernel_ext.notebook.cells.results import label_html
from hvdlab.kernel_ext.notebook.output.merge import Cleared, LiveLines, Shown, Text, label
from hvdlab.kernel_ext.notebook.output_channels import OutputChannel
from hvdlab.kernel_ext.wire.cells import Display

MESSAGE_CHARACTERS = 256 * 1024
"""Characters of one message at most."""
HURRIED_CHARACTERS = 300 * 1024
"""Characters of a backlog that are still shown after an interrupt."""

_ERASE = "\r\x1b[K"
_UP = "\x1b[1A"


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
        #: When the limiter admits the first message: before that, `tick` need not measure its text again.
        self._blocked_until = float("-inf")
        #: Whether the user has interrupted the cell: from then on most of the backlog is dropped.
        self._hurried = False
        #: Lines that were dropped, and that no notice has counted.
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
        #: Bytes that may go at once; `BYTES_PER_SECOND` are added, up to a burst.
        self._allowance = float(BURST_BYTES)
        #: Time and size of each message within the last `WINDOW`, oldest first, and below the sum of their sizes.
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
        # A message that is larger than a burst must not wait for ever.
        missing = min(size, BURST_BYTES) - self._allowance
        if missing > 0:
            at = now + missing / BYTES_PER_SECOND + 0.001
        over = self._bytes + min(size, WINDOW_BYTES) - WINDOW_BYTES
        if len(self._sent) >= WINDOW_MESSAGES:
            at = max(at, self._sent[0][0] + WINDOW)
        for sent_at, sent in self._sent:
            if over <= 0:
                break
            over -= sent
            at = max(at, sent_at + WINDOW)
        return at

    def _pass(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._allowance = min(BURST_BYTES, self._allowance + passed * BYTES_PER_SECOND)
        while self._sent and self._sent[0][0] + WINDOW <= now:
            self._bytes -= self._sent.popleft()[1]


class DisplayIds:
    """Areas of ranks' display ids in all cells of a notebook: a handle may be updated in a later cell than its own."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, str], str] = {}

    def get(self, rank: int, display_id: str) -> str | None:
        """Return the newest area of this rank's display id; None if it has none."""
        return self._by_id.get((rank, display_id))

    def put(self, rank: int, display_id: str, area: str) -> None:
        """Give this rank's display id this area from now on."""
        self._by_id[rank, display_id] = area

    def drop(self, rank: int, display_id: str, area: str) -> None:
        """Forget this area, which is gone, unless the display id has another one by now."""
        if self._by_id.get((rank, display_id)) == area:
            del self._by_id[rank, display_id]

    def clear(self) -> None:
        """Forget all areas: the ranks are gone."""
        self._by_id.clear()


class CellAreas:
    """Display areas of one cell, by rank and display id.

    Ranks choose display ids without knowing of each other, so each rank's id gets an area of its own. After a rank
    alone has cleared its output, its next displays take the areas of the cleared ones: a plot that is redrawn in a
    loop stays in its place while the other ranks' output stays untouched.

    Args:
        prefix: Prefix of the areas' names.
        known: The areas of all cells, which this one's are added to.
    """

    def __init__(self, prefix: str, known: DisplayIds | None = None) -> None:
        self._known = known or DisplayIds()
        self._names = (f"{prefix}-{n}" for n in count())
        self._by_id: dict[tuple[int, str], str] = {}
        #: Rank to the areas that it has used alone since its last clear.
        self._used: defaultdict[int, list[str]] = defaultdict(list)
        #: Rank to the areas that its last clear has freed, in the order in which displays reuse them.
        self._free: defaultdict[int, deque[str]] = defaultdict(deque)

    def find(self, rank: int, display_id: str) -> str | None:
        """Return the area that an update goes to, or None if there is none."""
        return self._by_id.get((rank, display_id)) or self._known.get(rank, display_id)

    def place(self, ranks: tuple[int, ...], display_id: str) -> tuple[str, bool]:
        """Return an area for a display, and whether it exists already."""
        reuse = len(ranks) == 1 and bool(self._free[ranks[0]])
        area = self._free[ranks[0]].popleft() if reuse else next(self._names)
        for rank in ranks:
            if display_id:
                self._by_id[rank, display_id] = area
                self._known.put(rank, display_id, area)
            if len(ranks) == 1:
                self._used[rank].append(area)
        return area, reuse

    def clear(self, rank: int) -> list[str]:
        """Free the areas of a rank that has cleared its output. Return those that an earlier clear freed and no display reused."""
        stale = list(self._free[rank])
        self._free[rank] = deque(self._used.pop(rank, ()))
        return stale

    def free(self, rank: int) -> list[str]:
        """Return the areas that wait for the rank's next display."""
        return list(self._free[rank])

    def forget(self) -> None:
        """Forget all areas of this cell: its output is gone."""
        for (rank, display_id), area in self._by_id.items():
            self._known.drop(rank, display_id, area)
        self._by_id.clear()
        self._used.clear()
        self._free.clear()

    def leftover(self) -> list[str]:
        """Return the areas of all ranks that were freed and not reused."""
        return [area for areas in self._free.values() for area in areas]


_EMPTY = {"text/plain": "", "text/html": ""}
_NO_TEXT = re.compile(r"(?:\s|</?(?:pre|code|span)\b[^<>]*>)*")


class NotebookScreen:
    """Screen of a notebook: text in few large messages, an area for each display, and one for all live lines.

    Args:
        publisher: Channel of the cell's messages.
        ranks: The ranks of the cell; a single rank gets no labels.
        cell: Unique id, for names of areas.
        clock: ``time.monotonic``.
        plain: Whether displays that all ranks have made alike get no label, as in a notebook without ranks.
        known: Areas of displays of other cells, which this one may update.
    """

    def __init__(
        self,
        publisher: OutputChannel,
        ranks: Sequence[int],
        cell: str,
        clock: Clock = time.monotonic,
        *,
        plain: bool = False,
        known: DisplayIds | None = None,
    ) -> None:
        self._publisher, self._ranks, self._plain = publisher, set(ranks), plain
        self._labelled = len(self._ranks) > 1
        self._areas = CellAreas(f"hvdlab-{cell}", known)
        self._outbox = PacedOutbox(publisher, clock)
        self._live_area = f"hvdlab-{cell}-live"
        #: Whether the page has the area of live lines, and whether there is a line in it.
        self._live_made = self._live_filled = False
        self._status = _StatusArea(f"hvdlab-{cell}-status")

    def begin(self, rank: int) -> None:
        self._ranks.add(rank)
        self._labelled = len(self._ranks) > 1

    # -- pieces -------------------------------------------------------------------------------------------------------

    def write(self, piece: Text) -> None:
        self._status.passed()
        self._outbox.text(piece.name, piece.text)

    def show(self, piece: Shown) -> None:
        self._status.passed()
        display, rank = piece.display, piece.ranks[0]
        known = self._areas.find(rank, display.display_id) if display.update else None
        if known is not None:
            self._display(self._labelled_data(piece), display.metadata, known, update=True)
            return
        if _is_blank(display):
            return
        area, exists = self._areas.place(piece.ranks, display.display_id)
        if self._gets_label(piece) and not exists and not _is_text(display):
            heading = {"text/html": label_html(piece.ranks), "text/plain": f"{format_ranks(piece.ranks)}:"}
            self._display(heading, {}, f"{area}-label")
        self._display(self._labelled_data(piece), display.metadata, area, update=exists)

    def clear(self, piece: Cleared) -> None:
        if set(piece.ranks) == self._ranks:
            self._areas.forget()
            # The page drops areas with the output: an update of one would show nothing.
            self._live_made = False
            self._status.forget()
            self._outbox.call(partial(self._publisher.clear, piece.wait))
            return
        for rank in piece.ranks:
            stale = self._areas.clear(rank)
            for area in stale if piece.wait else [*stale, *self._areas.free(rank)]:
                self._display(_EMPTY, {}, area, update=True)

    def live(self, piece: LiveLines) -> None:
        if piece.lines:
            self._display({"text/plain": piece.text()}, {}, self._live_area, update=self._live_made)
            self._live_made = True
        elif self._live_filled:
            self._display(_EMPTY, {}, self._live_area, update=self._live_made)
        self._live_filled = bool(piece.lines)

    def status(self, text: str, *, final: bool) -> None:
        for area, shown, update in self._status.place(text, final):
            self._display({"text/plain": shown} if shown else _EMPTY, {}, area, update=update)

    def finish(self) -> None:
        for area in self._areas.leftover():
            self._display(_EMPTY, {}, area, update=True)

    # -- sending ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        return self._outbox.tick(now)

    def backlog(self) -> int:
        return self._outbox.backlog

    def shorten(self) -> None:
        self._outbox.shorten()

    def _display(
        self, data: dict[str, Any], metadata: dict[str, Any], area: str, *, update: bool = False
    ) -> None:
        self._outbox.call(partial(self._publisher.display, data, metadata, area, update=update))

    def _gets_label(self, piece: Shown) -> bool:
        return self._labelled and not (self._plain and set(piece.ranks) == self._ranks)

    def _labelled_data(self, piece: Shown) -> dict[str, Any]:
        data = piece.display.data
        if not self._gets_label(piece) or not _is_text(piece.display):
            return data
        prefix = label(piece.ranks)
        return {"text/plain": "\n".join(prefix + line for line in str(data["text/plain"]).split("\n"))}


def _is_text(display: Display) -> bool:
    return set(display.data) == {"text/plain"}


def _is_blank(display: Display) -> bool:
    """Return whether a display shows nothing and never will, as the last one of rich's live displays: only its label would be seen."""
    if display.display_id or not display.data or set(display.data) - {"text/plain", "text/html"}:
        return False
    markup = str(display.data.get("text/html", ""))
    return not str(display.data.get("text/plain", "")).strip() and _NO_TEXT.fullmatch(markup) is not None


class _StatusArea:
    """Areas of the line about the ranks that a cell waits for: one while the wait lasts, and the next below the output after it."""

    def __init__(self, name: str) -> None:
        self._name, self._number = name, 0
        self._made = self._settled = self._passed = False

    def passed(self) -> None:
        """Remember that other output was shown."""
        self._passed = True

    def forget(self) -> None:
        """Forget the area: all output is gone."""
        self._made = False

    def place(self, text: str, final: bool) -> Iterator[tuple[str, str, bool]]:
        """Yield areas to show, with their text, and whether they exist."""
        if self._made and self._settled and self._passed and text:
            yield f"{self._name}-{self._number}", "", True
            self._made = False
            self._number += 1
        if text or self._made:
            yield f"{self._name}-{self._number}", text, self._made
            self._passed = self._passed and self._made
            self._made, self._settled = True, final


class TerminalScreen:
    """Screen of a terminal: text as it is, and the text form of displays.

    On a tty the live lines of the lowest rank that has some, and the cause of a wait, are redrawn in place below it;
    otherwise only finished lines appear.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = set(ranks)
        self._drawn = 0  # lines on screen now that have to be erased before anything is written
        self._live: list[str] = []
        self._status: list[str] = []
        self._waiting_noted = False

    def write(self, piece: Text) -> None:
        self._erase()
        write_to_terminal(piece.name, piece.text)
        self._draw()

    def show(self, piece: Shown) -> None:
        text = str(piece.display.data.get("text/plain", ""))
        if piece.display.update or not text:
            return
        prefix = label(piece.ranks) if len(self._ranks) > 1 else ""
        self.write(Text("stdout", "".join(f"{prefix}{line}\n" for line in text.splitlines())))

    def clear(self, piece: Cleared) -> None:
        self._erase()

    def live(self, piece: LiveLines) -> None:
        lowest = min((ranks[:1] for ranks, _ in piece.lines), default=())
        self._live = [label(ranks) + text for ranks, text in piece.lines if set(lowest) <= set(ranks)]
        self._erase()
        self._draw()

    def status(self, text: str, *, final: bool) -> None:
        if not _is_tty(sys.stderr):
            if text and (final or not self._waiting_noted):
                self.write(Text("stderr", f"{text}\n"))
            self._waiting_noted = not final
            return
        self._status = [] if final else text.split("\n")
        self._erase()
        if final and text:
            write_to_terminal("stderr", f"{text}\n")
        self._draw()

    def begin(self, rank: int) -> None:
        self._ranks.add(rank)

    def tick(self, now: float) -> float | None:
        return None

    def backlog(self) -> int:
        return 0

    def shorten(self) -> None:
        pass

    def finish(self) -> None:
        self._live, self._status = [], []
        self._erase()

    def _draw(self) -> None:
        lines = [line for line in (*self._live, *self._status) if line]
        if lines and _is_tty(sys.stderr):
            # Cut to the width: lines that wrapped could not be erased.
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\n".join(line[:width] for line in lines))
            sys.stderr.flush()
            self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            sys.stderr.write(_ERASE + f"{_UP}{_ERASE}" * (self._drawn - 1))
            self._drawn = 0


def write_to_terminal(name: str, text: str) -> None:
    """Write to stdout or stderr, in order."""
    stream = sys.stderr if name == "stderr" else sys.stdout
    if stream is sys.stderr:
        # The buffer of stdout has earlier text, which would appear behind this one.
        sys.stdout.flush()
    stream.write(text)
    stream.flush()


def _is_tty(stream: TextIO) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())

"""Lines that all ranks print alike are shown once; lines that differ are labelled.

The output of each rank is cut into lines, which are followed while they are being written. Progress bars overwrite their line after
a carriage return. Nested ones write a newline to reach the line below, and the sequence *cursor up* to return: such a newline ends
no line.

Each rank has a queue of lines. While every running rank has one, the heads are compared: equal heads become one line;
a head that another rank has further down waits until that rank's earlier lines are out; a line that no other rank has is shown
under its own rank at once. A line waits at most ``hold`` seconds for ranks whose queue is empty. The order of a rank's
lines, over both of its streams and its displays, is never changed, and nothing is dropped.

The merger is pure: time comes in as an argument, the next time limit goes out as :attr:`LineMerger.deadline`. :class:`MergingSink`
is the sink around it, which writes the merged output to a :class:`Screen`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

import msgspec

from hvdlab.collectives.settings import read_variable
from hvdlab.collectives.text import compact_ranks
from hvdlab.collectives.time_limits import Clock
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Clear, Display, Stream


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one stream, labels included; complete lines unless the cell runs on one rank only."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A rich display that these ranks made alike."""

    ranks: tuple[int, ...]
    display: Display


@dataclass(frozen=True, slots=True)
class Cleared:
    """These ranks called clear_output."""

    ranks: tuple[int, ...]
    wait: bool


@dataclass(frozen=True, slots=True)
class LiveLines:
    """The lines that are being written now (progress bars), which replace the last ones.

    Each comes with the ranks that have it, or with none if the cell runs on one rank only.
    """

    lines: tuple[tuple[tuple[int, ...], str], ...]

    def text(self) -> str:
        return "\n".join(label(ranks) + text for ranks, text in self.lines)


Piece = Text | Shown | Cleared | LiveLines


@lru_cache(maxsize=4096)
def label(ranks: tuple[int, ...]) -> str:
    """Return ``[0-2] ``, as it stands before each line; nothing for no ranks."""
    return f"[{compact_ranks(ranks)}] " if ranks else ""


def group_equal(texts: Sequence[tuple[int, str]]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Ranks by equal text, in the order in which the texts first occur."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return tuple((tuple(ranks), text) for text, ranks in groups.items())


LONGEST_LINE = 1 << 16
"""Characters of a line after which it is broken: browsers take seconds for lines that are much longer."""

MOST_ROWS = 100
"""Lines that one stream can have unfinished; no screen shows more bars."""

_UP = re.compile(r"\x1b\[(\d{0,3})A")
_MOVE = re.compile(r"(\n|\x1b\[\d{0,3}A)")
_BEGUN_SEQUENCE = re.compile(r"\x1b(?:\[\d{0,3})?")
_LONGEST_BEGUN = len("\x1b[999")
_AFTER_ERASED = re.compile(r"(?:\A|\r)[ \t]+\r([^\r]+)\Z")
"""Matches text where a bar was erased, such as that of ``tqdm.write``; a bar brings a carriage return of its own."""


@dataclass(slots=True)
class _Row:
    """A line to which the cursor can still return."""

    text: str = ""
    written: bool = True  # False for a line that exists only because the cursor went above all others
    left: float = 0.0  # when a newline moved the cursor below it

    @property
    def rewritten(self) -> bool:
        """Return whether it is the line of a bar, as far as is known."""
        return not self.written or "\r" in self.text.rstrip("\r")


class LineSplitter:
    """One stream of one rank.

    A carriage return goes back to the start of the line, so of a progress bar only the last state counts. A newline
    after such a line may only lead to a nested bar below it: the line is complete when other text follows, or when
    :meth:`expire` finds that the cursor has not come back. Lines longer than :data:`LONGEST_LINE` are broken into several.

    Attributes:
        since: When the first unfinished line was begun.
        moved_up: Whether the cursor has ever gone up.
    """

    def __init__(self) -> None:
        self.since = 0.0
        self.moved_up = False
        self._rows = [_Row()]
        self._at = 0  # the row of the cursor; those above it may be complete
        self._fresh = False  # a newline has led to this row, and nothing was written since
        self._begun = ""  # the beginning of a sequence of which the rest has not come

    def feed(self, text: str, now: float) -> list[str]:
        """Return the lines that are complete now, without their newlines."""
        if not self._unfinished:
            self.since = now
        text = self._begun + text
        self._begun = _begun_sequence(text)
        if self._begun:
            text = text[: -len(self._begun)]
        if len(self._rows) == 1 and "\r" not in text and "\r" not in self.partial and not _has_moves(text):
            lines = self._feed_plain(text)
        else:
            lines = self._feed_moves(text, now)
        if lines and self._unfinished:
            self.since = now
        return lines

    def flush(self) -> list[str]:
        """Return all lines that are left, and forget them."""
        self._rows[self._at].text += self._begun
        lines = self._release(self._at)
        lines += [line for row in self._rows if (line := current(row.text)).strip()]
        self._rows, self._at, self._fresh, self._begun = [_Row()], 0, False, ""
        return lines

    def expire(self, limit: float) -> list[str]:
        """Return the lines that the cursor left at ``limit`` or before: it does not come back to them."""
        return self._release(next((i for i in range(self._at) if self._rows[i].left > limit), self._at))

    def leave(self) -> list[str]:
        """Return the lines above the cursor: the rank has written elsewhere, so they are complete."""
        return self._release(self._at)

    @property
    def left_at(self) -> float | None:
        """When the cursor left the first line to which it could return; None without such a line."""
        return self._rows[0].left if self._at else None

    @property
    def partial(self) -> str:
        """Return the line of the cursor, with its carriage returns."""
        return self._rows[self._at].text

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Return the unfinished lines, without blank ones."""
        return tuple(line for row in self._rows if (line := current(row.text)).strip())

    @property
    def empty(self) -> bool:
        """Return whether no text is left, and the cursor can return to no other line."""
        return len(self._rows) == 1 and not self._rows[0].text and not self._begun

    @property
    def rewrites(self) -> bool:
        """Return whether an unfinished line was overwritten after a carriage return, as progress bars do."""
        return any("\r" in row.text for row in self._rows)

    @property
    def _unfinished(self) -> bool:
        return any(row.text.strip() for row in self._rows)

    def _feed_plain(self, text: str) -> list[str]:
        """Follow text without moves of the cursor: most output, which must cost little."""
        row = self._rows[0]
        lines = (row.text + text).split("\n")
        if len(lines[-1]) > LONGEST_LINE or (
            len(text) > LONGEST_LINE and max(map(len, lines)) > LONGEST_LINE
        ):
            lines = _broken(lines)
        row.text = lines.pop()
        return lines

    def _feed_moves(self, text: str, now: float) -> list[str]:
        lines: list[str] = []
        for part in _MOVE.split(text):
            if part == "\n":
                lines += self._move_down(now)
            elif up := _UP.fullmatch(part):
                self._move_up(int(up[1] or 1))
            elif part:
                lines += self._write(part)
        return lines

    def _write(self, text: str) -> list[str]:
        # Each state of a nested bar begins with a carriage return. Any other text below a bar is not of bars.
        lines = self._release(self._at) if self._fresh and text[0] != "\r" else []
        self._fresh = False
        row = self._rows[self._at]
        ordinary = _AFTER_ERASED.search(row.text + text)
        row.text, row.written = ordinary[1] if ordinary else _last_state(row.text + text), True
        if len(row.text) > LONGEST_LINE:
            lines += self._release(self._at)
            *whole, row.text = _broken([row.text])
            lines += whole
        return lines

    def _move_down(self, now: float) -> list[str]:
        row, lines = self._rows[self._at], []
        row.left = now
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        else:
            # The newline leads to the start of a line that exists: text overwrites it.
            below = self._rows[self._at]
            if below.text and not below.text.endswith("\r"):
                below.text = _last_state(f"{below.text}\r")
        bars_below = self._at + 1 < len(self._rows) or bool(self._rows[self._at].text)
        complete = not row.rewritten and (bool(row.text) or not bars_below)
        if (self._at == 1 and complete) or self._at >= MOST_ROWS:
            lines = self._release(1)
        self._fresh = True
        return lines

    def _move_up(self, count: int) -> None:
        self.moved_up = True
        if count > self._at:
            # The lines above are complete, so those that are written now are new ones.
            added = min(count - self._at, max(0, MOST_ROWS - len(self._rows)))
            self._rows[:0] = [_Row(written=False) for _ in range(added)]
            self._at += added
        self._at = max(0, self._at - count)
        self._fresh = False

    def _release(self, count: int) -> list[str]:
        """Return the first lines, and forget them."""
        if not count:
            return []
        lines = [current(row.text) for row in self._rows[:count] if row.written]
        del self._rows[:count]
        self._at -= count
        return lines


def shown_lines(text: str) -> list[str]:
    """Return the lines that a text leaves on a screen: progress bars once, in their last state."""
    splitter = LineSplitter()
    return splitter.feed(text, 0.0) + splitter.flush()


def lasting(text: str) -> int:
    """Return how many characters of a text stay on a screen: overwritten ones and moves to other lines do not count."""
    moves = _UP.findall(text) if "\x1b" in text else []
    if "\r" not in text and not moves:
        return len(text)
    *lines, last = text.split("\n")
    # A nested bar leaves with as many moves up as it has written newlines, so the one outweighs the other.
    stays = sum(len(current(_MOVE.split(line)[-1] if moves else line)) + 1 for line in lines)
    stays = max(0, stays - sum(int(count or 1) for count in moves))
    return stays + (0 if "\r" in last or moves else len(last))


def current(line: str) -> str:
    """Return the text that a line with carriage returns shows."""
    return next((part for part in reversed(line.split("\r")) if part), "") if "\r" in line else line


def _has_moves(text: str) -> bool:
    return "\x1b" in text and _UP.search(text) is not None


def _begun_sequence(text: str) -> str:
    """Return the end of a text that may be the beginning of *cursor up*."""
    at = text.rfind("\x1b", max(0, len(text) - _LONGEST_BEGUN))
    return text[at:] if at >= 0 and _BEGUN_SEQUENCE.fullmatch(text, at) else ""


def _broken(lines: Sequence[str]) -> list[str]:
    return [
        line[at : at + LONGEST_LINE] for line in lines for at in range(0, max(1, len(line)), LONGEST_LINE)
    ]


def _last_state(line: str) -> str:
    """Drop the overwritten states; a final carriage return is kept, since nothing was overwritten yet."""
    if "\r" not in line[:-1]:
        return line
    shown = current(line)
    if line.endswith("\r\r") and not shown.strip():
        return "\r"  # the next state of a bar that was erased
    return f"\r{shown}\r" if line.endswith("\r") else f"\r{shown}"


LONGEST_LIVE_LINE = 400
"""Characters shown of a line that is not complete yet: it is shown again and again while it grows."""

Source = tuple[int, str]
"""Rank and stream."""


class LiveView:
    """Decides when the unfinished lines are shown again, at most once per ``refresh`` seconds.

    A line that carriage returns rewrite is shown at once, another unfinished one after ``hold`` seconds, since its
    newline mostly follows soon. Nested bars are shown by position: the outer ones of all ranks, then the inner ones.
    """

    def __init__(self, splitters: Mapping[Source, LineSplitter], *, hold: float, refresh: float) -> None:
        self._splitters = splitters
        self._hold, self._refresh = hold, refresh
        #: The state that was returned last, and below when: an equal one is not shown again.
        self._shown: dict[Source, tuple[str, ...]] = {}
        self._at = float("-inf")

    @property
    def shows_lines(self) -> bool:
        """Return whether the state that was returned last has any line."""
        return bool(self._shown)

    @property
    def deadline(self) -> float | None:
        """When :meth:`take` will have a new state although nothing was written; None if it won't."""
        texts = {
            source: self._due_at(splitter) for source, splitter in self._splitters.items() if _text(splitter)
        }
        changed = [
            due for source, due in texts.items() if self._shown.get(source) != _text(self._splitters[source])
        ]
        changed += [self._at for source in self._shown if source not in texts]
        return max(min(changed), self._at + self._refresh) if changed else None

    def take(self, now: float) -> LiveLines | None:
        """Return the new state, or None if it is the same or was shown only just now."""
        texts = {s: _text(p) for s, p in self._splitters.items() if _text(p) and self._due_at(p) <= now}
        if texts == self._shown or (texts and now < self._at + self._refresh):
            return None
        self._shown, self._at = texts, now
        return LiveLines(
            tuple(
                line
                for position in range(max(map(len, texts.values()), default=0))
                for line in group_equal(
                    [(rank, lines[position]) for (rank, _), lines in texts.items() if position < len(lines)]
                )
            )
        )

    def _due_at(self, splitter: LineSplitter) -> float:
        return splitter.since if splitter.rewrites else splitter.since + self._hold


def _text(splitter: LineSplitter) -> tuple[str, ...]:
    return tuple(
        line if len(line) <= LONGEST_LIVE_LINE else f"{line[:LONGEST_LIVE_LINE]}…"
        for line in splitter.unfinished
    )


Key = Hashable


class RankQueue:
    """Queue that knows its contents and since when they wait.

    Args:
        rank: The rank that wrote the lines.
        totals: How often each line is in all ranks' queues together; the queues keep it up to date.

    Attributes:
        rank: The rank that wrote the lines.
        keys: The lines (or displays), oldest first.
        counts: How often each is in the queue.
    """

    __slots__ = ("_arrivals", "_totals", "counts", "keys", "rank")

    def __init__(self, rank: int, totals: dict[Key, int]) -> None:
        self.rank = rank
        self._totals = totals
        self.keys: deque[Key] = deque()
        self.counts: dict[Key, int] = {}
        self._arrivals: deque[list[float]] = deque()  # [time, how many of that time are left]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def head(self) -> Key:
        return self.keys[0]

    @property
    def oldest(self) -> float:
        """When the head came."""
        return self._arrivals[0][0]

    def older_than(self, limit: float) -> int:
        """Return how many lines came at ``limit`` or before."""
        found = 0
        for arrived, count in self._arrivals:
            if arrived > limit:
                break
            found += int(count)
        return found

    def extend(self, keys: Sequence[Key], now: float) -> None:
        if not keys:
            return
        self.keys.extend(keys)
        self._arrivals.append([now, len(keys)])
        for counts in (self.counts, self._totals):
            known = counts.get
            for key in keys:
                counts[key] = known(key, 0) + 1

    def pop(self, count: int) -> list[Key]:
        """Take ``count`` lines from the head."""
        take = self.keys.popleft
        taken = [take() for _ in range(count)]
        for counts in (self.counts, self._totals):
            for key in taken:
                left = counts[key] - 1
                if left:
                    counts[key] = left
                else:
                    del counts[key]
        while count:
            first = self._arrivals[0]
            if first[1] > count:
                first[1] -= count
                break
            count -= int(first[1])
            self._arrivals.popleft()
        return taken


HOLD = 0.25
"""Seconds that a line waits for the same line of other ranks, unless ``HVDLAB_OUTPUT_HOLD`` says otherwise."""

REFRESH = 0.1
"""Seconds between two updates of the live lines."""

_STREAMS = ("stdout", "stderr")
_ERR = "\0"  # before the key of a line of stderr, so that it never equals one of stdout
_content = msgspec.msgpack.Encoder().encode


class _Rich:
    """A display or a clear in a queue; equal if it shows the same."""

    __slots__ = ("chunk", "content")

    def __init__(self, chunk: Display | Clear) -> None:
        # A display that may be updated later belongs to its rank alone, else one rank's update would show as all ranks'.
        own = isinstance(chunk, Display) and bool(chunk.display_id)
        self.chunk, self.content = chunk, b"%d" % id(self) if own else _content(chunk)

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rich) and self.content == other.content


class LineMerger:
    """Merger of the output of several ranks.

    Args:
        ranks: All ranks that take part.
        hold: Seconds that a line waits for others.
        refresh: Seconds between two updates of the live lines.
        merge: False to label each line as it comes, without waiting.
    """

    def __init__(
        self, ranks: Sequence[int], *, hold: float = HOLD, refresh: float = REFRESH, merge: bool = True
    ) -> None:
        self.ranks = tuple(sorted(ranks))
        self.running = set(self.ranks)
        self._hold, self._merge = hold, merge
        self._labelled = len(self.ranks) > 1
        self._plain = not self._labelled  # text is passed on as it is
        #: How often each line is in all queues: so a head need not be searched for in each rank's.
        self._totals: dict[Key, int] = {}
        self._queues = {rank: RankQueue(rank, self._totals) for rank in self.ranks}
        self._splitters = {(r, s): LineSplitter() for r in self.ranks for s in _STREAMS}
        #: Those of them that may not be empty: mostly none, and then nothing need be done for them at each event of the cell.
        self._unfinished: set[Source] = set()
        self._pieces: list[Piece] = []
        #: Text of the stream `_name` that is in no piece yet: neighbouring lines become one piece.
        self._text: list[str] = []
        self._name = "stdout"
        self._live = LiveView(self._splitters, hold=hold, refresh=refresh)

    # -- input --------------------------------------------------------------------------------------------------------

    def feed(self, rank: int, chunks: Iterable[Chunk], now: float) -> None:
        """Add output of a rank."""
        for chunk in chunks:
            if self._plain:
                self._pass_on(rank, chunk, now)
            elif isinstance(chunk, Stream):
                other = "stdout" if chunk.name == "stderr" else "stderr"
                self._leave(rank, other, now)
                self._feed(rank, chunk.name, chunk.text, now)
            else:
                for name in _STREAMS:
                    self._leave(rank, name, now)
                self._add(rank, [_Rich(chunk)], now)

    def begin(self, rank: int) -> None:
        """Expect output of this rank, too, from now on."""
        self.running.add(rank)
        if rank in self._queues:
            return
        self.ranks = tuple(sorted({*self.ranks, rank}))
        self._queues[rank] = RankQueue(rank, self._totals)
        if self._plain:  # the beginning of a line is on the screen already
            self._splitters.update({source: LineSplitter() for source in self._splitters})
            self._unfinished.clear()
        self._splitters.update({(rank, stream): LineSplitter() for stream in _STREAMS})
        self._plain, self._labelled = False, True

    def end(self, rank: int, now: float) -> None:
        """Expect nothing more from this rank: its unfinished lines are complete now."""
        self.running.discard(rank)
        for name in _STREAMS:
            if (rank, name) in self._unfinished:
                self._add_lines(rank, name, self._splitters[rank, name].flush(), now)
                self._unfinished.discard((rank, name))

    def _feed(self, rank: int, name: str, text: str, now: float) -> None:
        source = rank, name
        splitter = self._splitters[source]
        self._add_lines(rank, name, splitter.feed(text, now), now)
        if splitter.empty:
            self._unfinished.discard(source)
        else:
            self._unfinished.add(source)

    def _leave(self, rank: int, name: str, now: float) -> None:
        """Add the lines above the cursor of a stream, since the rank writes elsewhere."""
        if (rank, name) in self._unfinished:
            self._add_lines(rank, name, self._splitters[rank, name].leave(), now)

    def _add_lines(self, rank: int, name: str, lines: list[str], now: float) -> None:
        if not self._plain:
            self._add(rank, [_ERR + line for line in lines] if name == "stderr" else lines, now)

    def _expire(self, now: float) -> None:
        """Add the lines of bars to which the cursor has not come back, as it does for a nested bar."""
        for (rank, name), splitter in self._splitters.items():
            if splitter.left_at is not None:
                self._add_lines(rank, name, splitter.expire(now - self._hold), now)

    def _add(self, rank: int, keys: Sequence[Key], now: float) -> None:
        if self._merge:
            self._queues[rank].extend(keys, now)
        else:
            self._emit((rank,), keys)

    def _pass_on(self, rank: int, chunk: Chunk, now: float) -> None:
        """Pass on the output of the only rank, until it has nested bars: frontends do not follow the cursor to them."""
        if not isinstance(chunk, Stream):
            self._emit((rank,), [_Rich(chunk)])
            return
        splitter = self._splitters[rank, chunk.name]
        splitter.leave()  # these lines are on the screen
        begun = splitter.partial
        lines = splitter.feed(chunk.text, now)
        self._unfinished.add((rank, chunk.name))
        self._switch(chunk.name)
        if not splitter.moved_up:
            self._text.append(chunk.text)
            return
        self._plain = False
        if "\r" in begun:  # the outer bar, which is a live line from now on
            self._text.append(f"\r{' ' * len(current(begun))}\r")
        self._add_lines(rank, chunk.name, lines, now)

    # -- output -------------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`take` although nothing new came; None if nothing waits."""
        if self._plain:
            return None
        limits = [q.oldest + self._hold for q in self._queues.values() if q] if self._totals else []
        if not self._unfinished and not self._live.shows_lines:
            return min(limits, default=None)
        limits += [left + self._hold for s in self._splitters.values() if (left := s.left_at) is not None]
        if (live := self._live.deadline) is not None:
            limits.append(live)
        return min(limits, default=None)

    def take(self, now: float) -> list[Piece]:
        """Return the pieces that can be shown now, and forget them."""
        if self._unfinished:
            self._expire(now)
        if self._totals:
            self._release(now)
        self._switch("")
        pieces, self._pieces = self._pieces, []
        if self._plain or not (self._unfinished or self._live.shows_lines):
            return pieces
        if (live := self._live.take(now)) is not None:
            if not self._labelled:
                live = LiveLines(tuple(((), text) for _, text in live.lines))
            # An ended bar comes again as text: it goes first, so that it is never seen twice.
            pieces.insert(0 if not live.lines else len(pieces), live)
        return pieces

    def take_all(self, now: float) -> list[Piece]:
        """Return all that was written, unfinished lines as well, although other ranks may still write the same."""
        return self.take(now + 2 * self._hold)

    def _release(self, now: float) -> None:
        limit = now - self._hold
        while filled := [q for q in self._queues.values() if q]:
            missing = any(not self._queues[rank] for rank in self.running)
            if not missing:
                self._round(filled, min((len(self._queues[r]) for r in self.running), default=None))
            elif any(q.oldest <= limit for q in filled):
                self._round(filled, max(q.older_than(limit) for q in filled))
            else:
                return

    def _round(self, queues: list[RankQueue], most: int | None) -> None:
        """Show at least one line, and at most ``most`` of each rank."""
        heads: dict[Key, list[RankQueue]] = {}
        for queue in queues:
            heads.setdefault(queue.head, []).append(queue)
        groups = list(heads.values())
        free = [group for group in groups if not self._others_have(group[0].head, group)]
        if not free:  # the ranks have the same lines in different order: one of them must come first
            self._show(groups[0], 1)
            return
        for group in free:
            self._show(group, self._common_run(group, most))

    def _others_have(self, key: Key, group: list[RankQueue]) -> bool:
        """Return whether a rank outside the group has this line in its queue."""
        own = group[0].counts[key] if len(group) == 1 else sum(queue.counts[key] for queue in group)
        return self._totals[key] > own

    def _common_run(self, group: list[RankQueue], most: int | None) -> int:
        """Return how many lines from the head on all queues of the group share, and no other queue has (at least one)."""
        length = min(len(queue) for queue in group)
        most = length if most is None else max(1, min(most, length))
        size, count = len(group), 0
        for keys in islice(zip(*(queue.keys for queue in group), strict=False), most):
            if keys.count(keys[0]) != size or (count and self._others_have(keys[0], group)):
                break
            count += 1
        return count

    def _show(self, group: list[RankQueue], count: int) -> None:
        keys = group[0].pop(count)
        for queue in group[1:]:
            queue.pop(count)
        self._emit(tuple(q.rank for q in group), keys)

    def _emit(self, ranks: tuple[int, ...], keys: Sequence[Key]) -> None:
        prefix = label(ranks) if self._labelled else ""
        for key in keys:
            if isinstance(key, str):
                if key[:1] == _ERR:
                    self._switch("stderr")
                    self._text.append(f"{prefix}{key[1:]}\n")
                else:
                    if self._name != "stdout":
                        self._switch("stdout")
                    self._text.append(f"{prefix}{key}\n")
            elif isinstance(key, _Rich):
                self._switch("")
                self._pieces.append(_piece(ranks, key.chunk))

    def _switch(self, name: str) -> None:
        """Make one piece of the text so far if another stream or something else follows."""
        if name == self._name:
            return
        if self._text:
            self._pieces.append(Text(self._name, "".join(self._text)))
            self._text = []
        self._name = name


def _piece(ranks: tuple[int, ...], chunk: Display | Clear) -> Piece:
    return Shown(ranks, chunk) if isinstance(chunk, Display) else Cleared(ranks, chunk.wait)


def hold_time(environ: Mapping[str, str]) -> float:
    """Return the seconds that a line waits for the same line of other ranks, as the user wants it.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    seconds = read_variable("HVDLAB_OUTPUT_HOLD", environ)
    return HOLD if seconds is None else float(seconds)  # type: ignore[arg-type]  # it is a number


class Screen(Protocol):
    """Screen for pieces of output, in order."""

    def write(self, piece: Text) -> None: ...
    def show(self, piece: Shown) -> None: ...
    def clear(self, piece: Cleared) -> None: ...
    def live(self, piece: LiveLines) -> None: ...

    def status(self, text: str, *, final: bool) -> None:
        """Show the cause of a wait in place of the previous one; empty to show nothing."""
        ...

    def begin(self, rank: int) -> None:
        """Add a rank that writes from now on."""

    def tick(self, now: float) -> float | None:
        """Show output that was held back. Return the time of the next call, or None."""
        ...

    def backlog(self) -> int:
        """Return the number of characters that are held back."""
        ...

    def shorten(self) -> None:
        """Shorten the output that is held back: the user has interrupted the cell."""

    def finish(self) -> None:
        """Erase the live lines and the status: no further output comes."""


class MergingSink(OutputSink):
    """Sink that merges the output of a run and shows it on a screen.

    Args:
        merger: Turns the ranks' output into pieces.
        screen: Shows them.
        clock: ``time.monotonic``.
    """

    def __init__(self, merger: LineMerger, screen: Screen, clock: Clock = time.monotonic) -> None:
        self._merger, self._screen, self._clock = merger, screen, clock
        self._within_line = (
            False  # the last text on stdout has no end of its line: that of a rank which is alone
        )

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._merger.feed(rank, chunks, self._clock())

    def began(self, rank: int) -> None:
        self._merger.begin(rank)
        self._screen.begin(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        self._merger.end(rank, self._clock())
        if not self._merger.running:
            self._show(self._merger.take(self._clock()))
            self._screen.finish()

    def note(self, text: str, *, warning: bool = False) -> None:
        self._show(self._merger.take(self._clock()))
        # Frontends show stderr on red, which is for failures.
        begin = "\n" if self._within_line and not warning else ""
        self._show([Text("stderr" if warning else "stdout", f"{begin}{text}\n")])

    def status(self, text: str, *, final: bool) -> None:
        self._show(self._merger.take(self._clock()))
        self._screen.status(text, final=final)

    def tick(self, now: float) -> float | None:
        self._show(self._merger.take(now))
        limits = [t for t in (self._merger.deadline, self._screen.tick(now)) if t is not None]
        return min(limits, default=None)

    def flush(self) -> None:
        self._show(self._merger.take_all(self._clock()))

    def backlog(self) -> int:
        return self._screen.backlog()

    def shorten(self) -> None:
        self._screen.shorten()

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text():
                    if piece.name == "stdout":
                        self._within_line = not piece.text.endswith("\n")
                    self._screen.write(piece)
                case Shown():
                    self._screen.show(piece)
                case Cleared():
                    self._screen.clear(piece)
                case LiveLines():
                    self._screen.live(piece)

"""Lines that all ranks print alike are shown once; what differs is labelled.

Each rank has a queue of lines. While every running rank has one, the heads are compared: equal heads become one line;
a head that another rank has further down waits until that rank's earlier lines are out; what no other rank has is shown
under its own rank at once. A line waits at most ``hold`` seconds for ranks whose queue is empty. The order of a rank's
lines, over both of its streams and its displays, is never changed, and nothing is dropped.

Pure: time comes in as an argument, the next time limit goes out as :attr:`LineMerger.deadline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from hvdlab.collectives.knobs import read
from hvdlab.kernel_ext.output.lines import LineSplitter, current
from hvdlab.kernel_ext.output.live import LiveView
from hvdlab.kernel_ext.output.pieces import Cleared, LiveLines, Piece, Shown, Text, label
from hvdlab.kernel_ext.output.queue import Key, RankQueue
from hvdlab.kernel_ext.wire.cells import Chunk, Clear, Display, Stream

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
    """Merges what several ranks write.

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
        self._totals: dict[Key, int] = {}
        self._queues = {rank: RankQueue(rank, self._totals) for rank in self.ranks}
        self._splitters = {(r, s): LineSplitter() for r in self.ranks for s in _STREAMS}
        self._pieces: list[Piece] = []
        self._text: list[str] = []
        self._name = "stdout"
        self._live = LiveView(self._splitters, hold=hold, refresh=refresh)

    # -- input --------------------------------------------------------------------------------------------------------

    def feed(self, rank: int, chunks: Iterable[Chunk], now: float) -> None:
        """Take what a rank wrote."""
        for chunk in chunks:
            if self._plain:
                self._pass_on(rank, chunk, now)
            elif isinstance(chunk, Stream):
                other = "stdout" if chunk.name == "stderr" else "stderr"
                self._add_lines(rank, other, self._splitters[rank, other].leave(), now)
                self._add_lines(
                    rank, chunk.name, self._splitters[rank, chunk.name].feed(chunk.text, now), now
                )
            else:
                for name in _STREAMS:
                    self._add_lines(rank, name, self._splitters[rank, name].leave(), now)
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
        self._splitters.update({(rank, stream): LineSplitter() for stream in _STREAMS})
        self._plain, self._labelled = False, True

    def end(self, rank: int, now: float) -> None:
        """Expect nothing more from this rank: its unfinished lines are complete now."""
        self.running.discard(rank)
        for name in _STREAMS:
            self._add_lines(rank, name, self._splitters[rank, name].flush(), now)

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
        """Pass on what the only rank wrote, until it has nested bars: frontends do not follow the cursor to them."""
        if not isinstance(chunk, Stream):
            self._emit((rank,), [_Rich(chunk)])
            return
        splitter = self._splitters[rank, chunk.name]
        splitter.leave()  # these lines are on the screen
        begun = splitter.partial
        lines = splitter.feed(chunk.text, now)
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
        limits = [q.oldest + self._hold for q in self._queues.values() if q]
        limits += [left + self._hold for s in self._splitters.values() if (left := s.left_at) is not None]
        if (live := self._live.deadline) is not None:
            limits.append(live)
        return min(limits, default=None)

    def take(self, now: float) -> list[Piece]:
        """Return the pieces that can be shown now, and forget them."""
        self._expire(now)
        if self._merge:
            self._release(now)
        self._switch("")
        pieces, self._pieces = self._pieces, []
        if not self._plain and (live := self._live.take(now)) is not None:
            if not self._labelled:
                live = LiveLines(tuple(((), text) for _, text in live.lines))
            # An ended bar comes again as text: it goes first, so that it is never seen twice.
            pieces.insert(0 if not live.lines else len(pieces), live)
        return pieces

    def take_all(self, now: float) -> list[Piece]:
        """All that was written, unfinished lines as well, although other ranks may still write the same."""
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
        """Whether a rank outside the group has this line in its queue."""
        own = group[0].counts[key] if len(group) == 1 else sum(queue.counts[key] for queue in group)
        return self._totals[key] > own

    def _common_run(self, group: list[RankQueue], most: int | None) -> int:
        """How many lines from the head on all queues of the group share, and no other queue has (at least one)."""
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
    """Seconds that a line waits for the same line of other ranks, as the user wants it.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    return float(read(environ).get("HVDLAB_OUTPUT_HOLD", HOLD))  # type: ignore[arg-type]  # it is a number

"""A limit to the output that a rank shows: its beginning and its end, if that is more than a user reads.

Beyond a rank's share, one line shows its newest line, in place, and at the end its last lines are shown. All of it is in the
transcript, and one line names that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.collectives.settings import read_variable
from hvdlab.collectives.text import format_ranks
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import KeptOutput, OutputSink
from hvdlab.kernel_ext.notebook.output.merge import lasting, shown_lines
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Clear, Display, Stream

SHOWN = 4 << 20
"""Characters of a cell that are shown, unless ``HVDLAB_OUTPUT_SHOWN`` says otherwise."""

LEAST_SHARE = 64 << 10
"""Characters of each rank that are shown in any case."""

DISPLAYS = 8
"""Displays may take this many times as many characters as text."""

REFRESH = 0.5
"""Seconds between two updates of the line that stands for what is not shown."""

LAST_LINES = 20
LAST_CHARACTERS = 8 << 10
LIVE_CHARACTERS = 100


@dataclass(slots=True)
class _Rank:
    """One rank's account, in characters."""

    shown: int = 0
    rich: int = 0
    cut: bool = False
    hidden: int = 0
    displays: int = 0  # not shown
    tail: str = ""
    live: str = ""
    open_lines: set[str] = field(default_factory=set)  # streams whose last line has no end yet


class LimitedSink(OutputSink):
    """Sink that passes on the beginning and the end of each rank's output.

    Lines that carriage returns rewrite count once, and output that ``clear_output`` removes counts no longer, so that bars
    and plots that are redrawn go on for ever.

    Args:
        inner: Shows it.
        ranks: The ranks of the cell; each gets an equal share.
        limit: Characters of all ranks together.
    """

    def __init__(self, inner: OutputSink, ranks: Sequence[int], limit: int) -> None:
        self._inner = inner
        self._plain = len(ranks) == 1
        self._share = max(LEAST_SHARE, limit // max(1, len(ranks)))
        self._ranks = {rank: _Rank() for rank in ranks}
        self._running = set(ranks)
        #: Ranks whose hidden output has grown since their line was shown; below, when these lines may be shown again.
        self._changed: set[int] = set()
        self._at = 0.0
        #: Whether the line about the limit was shown: one for the cell, not one for each rank.
        self._explained = False
        self._transcript: KeptOutput | None = None

    def set_transcript(self, transcript: KeptOutput) -> None:
        self._transcript = transcript

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        # Looked up for each chunk: one that clears the output of a single rank replaces its account.
        passed = tuple(
            part for chunk in chunks if (part := self._pass(rank, self._ranks[rank], chunk)) is not None
        )
        if passed:
            self._inner.output(rank, passed)
        if self._ranks[rank].cut and not self._explained:
            self._explained = True
            self._inner.note(self._explanation(rank))

    def began(self, rank: int) -> None:
        self._ranks.setdefault(rank, _Rank())
        self._running.add(rank)
        self._plain = len(self._ranks) == 1
        self._inner.began(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        account = self._ranks[rank]
        if account.hidden:
            self._inner.output(rank, (self._last_lines(account),))
        self._changed.discard(rank)
        self._running.discard(rank)
        if not self._running and self._explained and (lost := self._lost()):
            self._inner.note(lost, warning=True)
        self._inner.done(rank, done)

    def note(self, text: str, *, warning: bool = False) -> None:
        self._inner.note(text, warning=warning)

    def status(self, text: str, *, final: bool) -> None:
        self._inner.status(text, final=final)

    def flush(self) -> None:
        self._inner.flush()

    def shorten(self) -> None:
        self._inner.shorten()

    def backlog(self) -> int:
        return self._inner.backlog()

    def finished(self, results: CellResults) -> None:
        self._inner.finished(results)

    def tick(self, now: float) -> float | None:
        if self._changed and now >= self._at:
            self._at = now + REFRESH
            for rank in sorted(self._changed):
                self._inner.output(rank, (self._live_line(self._ranks[rank]),))
            self._changed.clear()
        limits = [at for at in (self._inner.tick(now), self._at if self._changed else None) if at is not None]
        return min(limits, default=None)

    # -- what is shown ------------------------------------------------------------------------------------------------

    def _pass(self, rank: int, account: _Rank, chunk: Chunk) -> Chunk | None:
        if isinstance(chunk, Stream):
            return self._text(rank, account, chunk)
        if isinstance(chunk, Clear):
            account.rich = 0
            if self._plain:
                self._ranks[rank] = _Rank()
                self._changed.discard(rank)
            return chunk
        return self._display(account, chunk)

    def _text(self, rank: int, account: _Rank, chunk: Stream) -> Stream | None:
        if account.cut:
            self._hide(rank, account, chunk.text)
            return None
        length = lasting(chunk.text)
        room = self._share - account.shown
        if length <= room:
            account.shown += length
            (account.open_lines.discard if chunk.text.endswith("\n") else account.open_lines.add)(chunk.name)
            return chunk
        account.cut = True
        account.open_lines.discard(chunk.name)
        end = chunk.text.rfind("\n", 0, room) + 1 or room
        self._hide(rank, account, chunk.text[end:])
        head = chunk.text[:end]
        # The line that stands for the rest must begin on a line of its own.
        return Stream(chunk.name, head if head.endswith("\n") else f"{head}\n")

    def _display(self, account: _Rank, display: Display) -> Display | None:
        if display.update:
            return display
        if account.rich > self._share * DISPLAYS:
            account.displays += 1
            account.hidden += 1
            return None
        account.rich += sum(len(value) if isinstance(value, str) else 64 for value in display.data.values())
        return display

    def _hide(self, rank: int, account: _Rank, text: str) -> None:
        if not text:
            return
        account.hidden += len(text)
        account.tail = (account.tail + text[-LAST_CHARACTERS:])[-LAST_CHARACTERS:]
        self._changed.add(rank)

    # -- what stands for the rest -------------------------------------------------------------------------------------

    def _live_line(self, account: _Rank) -> Stream:
        last = next((line for line in reversed(shown_lines(account.tail)) if line.strip()), "")
        text = f"… {_amount(account.hidden)} more; now: {last}"[:LIVE_CHARACTERS]
        # On a screen that only overwrites, a shorter line would leave the end of the one that it replaces.
        account.live = text.ljust(LIVE_CHARACTERS) if self._plain else text
        begin = "\n\r" if "stdout" in account.open_lines else "\r"
        account.open_lines.discard("stdout")
        return Stream("stdout", f"{begin}{account.live}")

    def _last_lines(self, account: _Rank) -> Stream:
        complete = account.hidden <= len(account.tail)
        lines = shown_lines(account.tail)[-LAST_LINES:]
        if len(account.tail) == LAST_CHARACTERS and len(lines) > 1:
            lines = lines[-LAST_LINES:] if len(lines) == LAST_LINES else lines[1:]
        displays = f" and {account.displays} displays" if account.displays else ""
        heading = f"… {_amount(account.hidden)} more{displays}" + ("" if complete else "; the last lines:")
        heading = heading.ljust(len(account.live)) if self._plain else heading
        restart = "\r" if account.live else ""
        return Stream("stdout", "\n".join([restart + heading, *lines, ""]))

    def _explanation(self, rank: int) -> str:
        others = "" if self._plain else " of each rank"
        said = f"{format_ranks([rank])} wrote more than the {_amount(self._share)}{others} that are shown (HVDLAB_OUTPUT_SHOWN)"
        if self._transcript is None:
            return said
        number = self._transcript.label.strip("[]")
        where = self._transcript.directory
        files = f"; it is in {where}" if where is not None else ""
        return f"{said}; `%hvd_output {number} --to FILE` writes all of it{files}"

    def _lost(self) -> str:
        transcript = self._transcript
        if transcript is None or not transcript.lost:
            return ""
        return f"the last {_amount(transcript.lost)} of this cell's output were not kept: {transcript.why}"


def shown_limit(environ: Mapping[str, str]) -> int:
    """Characters of a cell that are shown, as the user wants it; 0 for all.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    characters = read_variable("HVDLAB_OUTPUT_SHOWN", environ)
    return SHOWN if characters is None else int(characters)  # type: ignore[arg-type]  # it is a number


def _amount(size: int) -> str:
    for unit, power in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= power:
            return f"{size / power:.1f} {unit}"
    return f"{size} characters"

"""Output of ranks and about them: lines labelled with their rank, files, and the report of a failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TextIO

from hvdlab.collectives.errors import InvalidRequestError, call_name
from hvdlab.collectives.text import format_ranks, visible, visible_coloured
from hvdlab.collectives.time_limits import Clock
from hvdlab.collectives.types import OpKind, Stall
from hvdlab.launch.host_agent.rank_process import STDERR, STDOUT
from hvdlab.launch.processes import OutputTail
from hvdlab.runner.events import FailureReport


class Sink(Protocol):
    """Receiver of the output of all ranks, in bytes."""

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Show a rank's output to stdout (1) or stderr (2)."""

    def ended(self, rank: int) -> None:
        """Record a rank's end; no more output follows from it."""

    def close(self) -> None:
        """Finish the output at the job's end."""


class Writer:
    """Writer of whole lines to a text stream, or to the binary stream beneath it, if there is one.

    A reader that goes away (``hvdlab run … | head``) ends the output, not the job.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: Any = stream
        self._binary: IO[bytes] | None = getattr(stream, "buffer", None)
        self.terminal = _is_terminal(stream)
        #: Whether the last line is to be overwritten by the next.
        self._passing = False

    def line(self, line: bytes, passing: bool) -> None:
        """Write a line; a ``passing`` one may be overwritten by the next where that is possible."""
        if self.terminal:
            # The line that is overwritten may be longer than this one, so the terminal is asked to erase
            # it.
            line = (b"\x1b[K" if self._passing else b"") + line + (b"\r" if passing else b"\n")
            self._passing = passing
        else:
            line += b"\n"
        with contextlib.suppress(BrokenPipeError, ValueError):
            if self._binary is not None:
                self._binary.write(line)
            else:
                self._stream.write(line.decode("utf-8", "backslashreplace"))

    def flush(self) -> None:
        """Flush the stream, so that its lines are seen."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.flush()

    def say(self, text: str) -> None:
        """Write a line of the launcher's own, with ``hvdlab:`` in front, so that it is seen."""
        self.line(f"hvdlab: {visible_coloured(text)}".encode(), False)
        self.flush()


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class ConsoleSink:
    """Sink that prints each line with its rank in front, on the line's own stream.

    Args:
        out, err: The streams.
        plain: No rank in front.
        timestamp: Put the time in front of the rank.
        clock: For progress bars.
    """

    def __init__(
        self,
        out: Writer,
        err: Writer,
        *,
        plain: bool = False,
        timestamp: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._writers = {STDOUT: out, STDERR: err}
        self._plain, self._timestamp, self._clock = plain, timestamp, clock
        #: Unfinished lines by rank and stream.
        self._lines: dict[tuple[int, int], LineAssembler] = {}

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Pass on the lines that are complete now."""
        lines = self._lines.get((rank, stream))
        if lines is None:
            redraw = REDRAW_TERMINAL if self._writers[stream].terminal else REDRAW_PLAIN
            lines = self._lines[rank, stream] = LineAssembler(redraw, self._clock)
        self._show(rank, stream, lines.feed(data))
        self._writers[stream].flush()

    def ended(self, rank: int) -> None:
        """Pass on a last line without an end."""
        for stream, writer in self._writers.items():
            lines = self._lines.pop((rank, stream), None)
            if lines is not None:
                self._show(rank, stream, lines.finish())
                writer.flush()

    def close(self) -> None:
        """Do nothing: :meth:`ended` has passed on the held output."""

    def _show(self, rank: int, stream: int, lines: Sequence[AssembledLine]) -> None:
        fixed = b"" if self._plain else prefix(rank, stream)
        for text, passing in lines:
            head = prefix(rank, stream, time.asctime()) if self._timestamp else fixed
            self._writers[stream].line(head + text, passing)


class FileSink:
    """Sink to ``DIRECTORY/rank.N/stdout`` and ``stderr``, byte for byte; N has as many digits as the largest rank at the start.

    Raises:
        InvalidRequestError: The files can't be made.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._files: dict[tuple[int, int], IO[bytes]] = {}
        self._directory, self._digits = directory, len(str(max(0, size - 1)))
        try:
            for rank in range(size):
                self._open(rank)
        except OSError as error:
            self.close()
            raise InvalidRequestError(f"the output can't go to {directory}: {error}") from error

    def _open(self, rank: int) -> None:
        place = self._directory / f"rank.{rank:0{self._digits}d}"
        place.mkdir(parents=True, exist_ok=True)
        for stream, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
            self._files[rank, stream] = open(place / name, "wb", buffering=0)  # noqa: SIM115

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Append to the rank's file of this stream."""
        if (rank, stream) not in self._files:  # a rank that was added while the job ran
            self._open(rank)
        view = memoryview(data)
        while view:
            view = view[self._files[rank, stream].write(view) :]

    def ended(self, rank: int) -> None:
        """Do nothing: a rank can be restarted, so its files stay open."""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


LONGEST = 1 << 20
"""Bytes of a line without an end that are held before they are passed on as a line."""
REDRAW_TERMINAL, REDRAW_PLAIN = 0.1, 10.0
"""Seconds between two states of a progress bar that are shown, on a terminal and elsewhere."""


class AssembledLine(NamedTuple):
    """Line of a rank's output without its end.

    Attributes:
        text: Its bytes.
        passing: Whether it is a state of a progress bar, which the next line may overwrite.
    """

    text: bytes
    passing: bool


class LineAssembler:
    """Assembler of lines from one stream of one rank. Without I/O.

    A line that carriage returns overwrite, as progress bars do, is passed on in its last state when it ends, and in
    between at most every ``redraw`` seconds.

    Args:
        redraw: Seconds between passing states.
        clock: Source of monotonic seconds.
    """

    __slots__ = ("_clock", "_held", "_redraw", "_shown_at")

    def __init__(self, redraw: float = REDRAW_PLAIN, clock: Clock = time.monotonic) -> None:
        self._redraw, self._clock = redraw, clock
        #: Text without a line's end so far, and when a passing state was shown last, by the clock.
        self._held = b""
        self._shown_at = -redraw

    def feed(self, data: bytes) -> list[AssembledLine]:
        """Add the next bytes; returns the lines that are due with them."""
        data = self._held + data
        *whole, rest = data.split(b"\n")
        lines = [AssembledLine(_visible(line.removesuffix(b"\r")), False) for line in whole]
        if b"\r" in rest[:-1] or (rest.endswith(b"\r") and len(rest) > 1):
            rest = self._passing(rest, lines)
        while len(rest) > LONGEST:
            lines.append(AssembledLine(rest[:LONGEST], False))
            rest = rest[LONGEST:]
        self._held = rest
        return lines

    def finish(self) -> list[AssembledLine]:
        """End the stream; returns the remaining text as a line, if there is any."""
        rest, self._held = _visible(self._held.rstrip(b"\r")), b""
        return [AssembledLine(rest, False)] if rest else []

    def _passing(self, rest: bytes, lines: list[AssembledLine]) -> bytes:
        """Drop overwritten text; from time to time add the present state to ``lines``."""
        # A carriage return at the end may be the first half of a line's end, so it stays.
        state = _visible(rest.rstrip(b"\r"))
        now = self._clock()
        if now - self._shown_at >= self._redraw:
            self._shown_at = now
            lines.append(AssembledLine(state, True))
        return state + b"\r" if rest.endswith(b"\r") else b"\r" + state


def _visible(line: bytes) -> bytes:
    """Return a line with carriage returns as a terminal would show it, roughly: its last state."""
    if b"\r" not in line:
        return line
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")


def prefix(rank: int, stream: int, timestamp: str = "") -> bytes:
    """Return ``[3]<stdout>:`` as horovodrun writes it."""
    return f"{timestamp}[{rank}]<{'stdout' if stream == 1 else 'stderr'}>:".encode()


MOST_LINES = 20
"""Lines of a failed rank's stderr in the report."""


def failure_lines(failure: FailureReport, tails: Mapping[int, OutputTail], host: str = "") -> list[str]:
    """Return the report: which rank failed first, how, its last lines on stderr, and which ranks failed because of it.

    Args:
        failure: The supervisor's account of the failure.
        tails: The end of each rank's stderr, by rank.
        host: Name of the host of the rank that failed; empty if it is not worth naming.
    """
    where = f" on {host}" if host else ""
    how = str(failure.outcome) if failure.outcome is not None else "it does not end"
    error = f" ({visible(failure.error)})" if failure.error else ""
    if failure.outcome is None and failure.error:
        how, error = visible(failure.error), ""
    lines = [f"rank {failure.rank}{where} failed first: {how}{error}"]
    if failure.early:
        verb = "has" if len(failure.early) == 1 else "have"
        lines[0] = (
            f"{format_ranks(failure.early)} {verb} ended (exit code 0) while others still needed "
            f"{'it' if len(failure.early) == 1 else 'them'}; rank {failure.rank}{where}: {how}{error}"
        )
    tail = tails.get(failure.rank)
    last = shown_lines(tail.data, MOST_LINES) if tail is not None else []
    if last:
        lines.append(f"the last lines of rank {failure.rank} on stderr:")
        lines += [f"  {line}" for line in last]
    if failure.followers:
        lines.append(f"{format_ranks(failure.followers)} failed because of it")
    return lines


def shown_lines(data: bytes, most: int) -> list[str]:
    """Return the last ``most`` lines that are not empty, as a terminal would show them."""
    text = data.decode("utf-8", "backslashreplace")
    shown = (_visible(line.encode()).decode().rstrip() for line in text.splitlines())
    return [line for line in shown if line][-most:]


def stall_line(stall: Stall) -> str:
    """Return the line on a collective that has been waiting for long."""
    call = call_name(OpKind(stall.kind).label, stall.name)
    site = f" ({visible(stall.sites[0])})" if stall.sites else ""
    return (
        f"stalled: {call}{site}: {format_ranks(stall.waited)} waiting for {stall.seconds:.0f} s; "
        f"{format_ranks(stall.missing)} missing"
    )

"""Where the output of ranks goes: the launcher's own streams, or files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.exec_agent.child import STDERR, STDOUT
from hvdlab.runner.lines import REDRAW_PLAIN, REDRAW_TERMINAL, LineAssembler, prefix


class Sink(Protocol):
    """Takes the bytes of all ranks."""

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """A rank wrote to stdout (1) or stderr (2)."""

    def ended(self, rank: int) -> None:
        """A rank has ended; nothing more comes from it."""

    def close(self) -> None:
        """The job is over."""


class Writer:
    """Writes whole lines to a text stream, or to the binary stream beneath it, if there is one.

    A reader that goes away (``hvdlab run … | head``) ends the output, not the job.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: Any = stream
        self._binary: IO[bytes] | None = getattr(stream, "buffer", None)
        self.terminal = _is_terminal(stream)
        self._passing = False

    def line(self, line: bytes, passing: bool) -> None:
        """Write a line; a ``passing`` one may be overwritten by the next where that is possible."""
        if self.terminal:
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
        """Flush the stream, so that what was written is seen."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.flush()


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class ConsoleSink:
    """Each line with its rank in front, on the stream it was written to.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writers = {STDOUT: out, STDERR: err}
        self._plain, self._timestamp, self._clock = plain, timestamp, clock
        self._lines: dict[tuple[int, int], LineAssembler] = {}

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Pass on the lines that are complete now."""
        lines = self._lines.get((rank, stream))
        if lines is None:
            lines = self._lines[rank, stream] = self._assembler(rank, stream)
        lines.feed(data)
        self._writers[stream].flush()

    def ended(self, rank: int) -> None:
        """Pass on a last line without an end."""
        for stream, writer in self._writers.items():
            lines = self._lines.pop((rank, stream), None)
            if lines is not None:
                lines.finish()
                writer.flush()

    def close(self) -> None:
        """Do nothing: :meth:`ended` has passed on what was held."""

    def _assembler(self, rank: int, stream: int) -> LineAssembler:
        writer = self._writers[stream]
        fixed = b"" if self._plain else prefix(rank, stream)

        def emit(line: bytes, passing: bool) -> None:
            head = prefix(rank, stream, time.asctime()) if self._timestamp else fixed
            writer.line(head + line, passing)

        return LineAssembler(emit, REDRAW_TERMINAL if writer.terminal else REDRAW_PLAIN, self._clock)


class FileSink:
    """``DIRECTORY/rank.N/stdout`` and ``stderr``, byte for byte; N has as many digits as the largest rank at the start.

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
        """A rank may be started anew, so its files stay open."""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

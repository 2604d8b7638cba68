"""From bytes in pieces to whole lines."""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.processes import OutputTail
from hvdlab.runner.output import (
    LONGEST,
    AssembledLine,
    ConsoleSink,
    FileSink,
    LineAssembler,
    Writer,
    shown_lines,
)
from support.effort import examples


class Lines:
    def __init__(self, redraw: float = 10.0) -> None:
        self.now = 100.0
        self.lines: list[bytes] = []
        self.passing: list[bytes] = []
        self._assembler = LineAssembler(redraw, lambda: self.now)

    def feed(self, data: bytes) -> None:
        self._take(self._assembler.feed(data))

    def finish(self) -> None:
        self._take(self._assembler.finish())

    def _take(self, lines: list[AssembledLine]) -> None:
        for text, passing in lines:
            (self.passing if passing else self.lines).append(text)


@settings(max_examples=examples(100))
@given(text=st.binary(max_size=200).map(lambda b: b.replace(b"\r", b"")), cuts=st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_how_they_come(text: bytes, cuts: list[int]) -> None:
    lines = Lines()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in itertools.pairwise(edges):
        lines.feed(text[start:end])
    lines.finish()
    expected = text.split(b"\n")
    assert lines.lines == (expected[:-1] if not expected[-1] else expected)


def test_a_progress_bar_ends_as_its_last_state() -> None:
    lines = Lines()
    for percent in range(101):
        lines.feed(b"\r%3d%%" % percent)
    lines.feed(b"\ndone\n")
    assert lines.lines == [b"100%", b"done"]
    assert lines.passing == [b"  0%"]


def test_a_progress_bar_is_shown_from_time_to_time() -> None:
    lines = Lines(redraw=1.0)
    for step in range(6):
        lines.now += 0.5
        lines.feed(b"%d\r" % step)
    assert lines.passing == [b"0", b"2", b"4"]
    lines.finish()
    assert lines.lines == [b"5"]


def test_windows_line_ends() -> None:
    lines = Lines()
    lines.feed(b"a\r")
    lines.feed(b"\nb\r\n")
    assert lines.lines == [b"a", b"b"]


def test_a_line_without_an_end_is_bounded() -> None:
    lines = Lines()
    for _ in range(3):
        lines.feed(b"x" * LONGEST)
    lines.finish()
    assert b"".join(lines.lines) == b"x" * (3 * LONGEST)


def test_tail_keeps_the_last_lines() -> None:
    tail = OutputTail()
    for number in range(10_000):
        tail.add(b"line %d\n" % number)
    tail.add(b"\n\xff\r\nlast")
    assert shown_lines(tail.data, 3) == ["line 9999", "\\xff", "last"]


def _console(*, timestamp: bool = False) -> tuple[ConsoleSink, io.TextIOWrapper, io.TextIOWrapper]:
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    return ConsoleSink(Writer(out), Writer(err), timestamp=timestamp), out, err


def _bytes(stream: io.TextIOWrapper) -> bytes:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def test_ranks_are_named_and_never_mixed_in_a_line() -> None:
    sink, out, err = _console()
    sink.write(0, 1, b"one ")
    sink.write(1, 1, b"other\n")
    sink.write(0, 2, b"warning\n")
    sink.write(0, 1, b"line\nrest")
    sink.ended(0)
    assert _bytes(out) == b"[1]<stdout>:other\n[0]<stdout>:one line\n[0]<stdout>:rest\n"
    assert _bytes(err) == b"[0]<stderr>:warning\n"


def test_timestamps() -> None:
    sink, out, _ = _console(timestamp=True)
    sink.write(3, 1, b"x\n")
    assert _bytes(out).endswith(b"[3]<stdout>:x\n")
    assert not _bytes(out).startswith(b"[")


def test_bytes_that_are_no_text() -> None:
    sink, out, _ = _console()
    sink.write(0, 1, b"\xff\x00\xfe\n")
    assert _bytes(out) == b"[0]<stdout>:\xff\x00\xfe\n"
    text = io.StringIO()  # a notebook's stream takes text only
    ConsoleSink(Writer(text), Writer(text)).write(0, 1, b"\xff\n")
    assert text.getvalue() == "[0]<stdout>:\\xff\n"


def test_a_terminal_shows_one_state_over_the_other() -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Terminal(io.BytesIO())
    sink = ConsoleSink(Writer(stream), Writer(sys.stderr))
    sink.write(0, 1, b"\r10%")
    sink.write(1, 1, b"hello\n")
    assert _bytes(stream) == b"[0]<stdout>:10%\r\x1b[K[1]<stdout>:hello\n"


def test_files_are_padded_to_one_width(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out", 11)
    sink.write(3, 1, b"\xffpartial")
    sink.ended(3)
    sink.write(10, 2, b"error\n")
    sink.close()
    assert (tmp_path / "out/rank.03/stdout").read_bytes() == b"\xffpartial"
    assert (tmp_path / "out/rank.10/stderr").read_bytes() == b"error\n"
    assert (tmp_path / "out/rank.00/stdout").read_bytes() == b""


def test_a_directory_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="the output can't go to"):
        FileSink(tmp_path / "file", 2)

"""Rank's output as found after its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.kernel_ext.wire import crash_ring as unsent_module
from hvdlab.kernel_ext.wire.cells import Clear, CrashOutput, Display, Stream
from hvdlab.kernel_ext.wire.crash_ring import (
    HEADER,
    LARGEST,
    LARGEST_DISPLAY,
    MARK_EVERY,
    SLACK,
    CrashRing,
    make_area,
)


@pytest.fixture
def area() -> Iterator[int]:
    descriptor = make_area()
    yield descriptor
    os.close(descriptor)


def read(area: int) -> CrashOutput | None:
    found = unsent_module.read(area)
    return found.left if found is not None else None


def unread(area: int) -> Mapping[str, bytes]:
    found = unsent_module.read(area)
    assert found is not None
    return found.unread


def text_of(left: CrashOutput | None) -> str:
    assert left is not None
    return "".join(chunk.text for chunk in left.chunks if isinstance(chunk, Stream))


def test_nothing_is_found_of_who_began_no_cell(area: int) -> None:
    unsent = CrashRing(area)
    assert read(area) is None
    unsent.begin("c", 1 << 20)
    unsent.write("stdout", "text")
    unsent.close()
    assert read(area) is None


def test_streams_and_displays_stay_in_order(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c7", 1 << 20)
    shown = Display({"text/plain": "ü"}, {})
    unsent.write("stdout", "a")
    unsent.write("stdout", "b\n")
    unsent.write("stderr", "grün\n")
    display, clear = unsent.append_display(shown, 20), unsent.append_display(Clear(True), 16)
    unsent.write("stdout", "z")
    unsent.append_display(Display({"image/png": "x"}, {}), LARGEST_DISPLAY + 1)
    left = read(area)
    assert left is not None
    assert (left.cell, left.before) == ("c7", 0)
    assert left.chunks == (
        Stream("stdout", "ab\n"),
        Stream("stderr", "grün\n"),
        shown,
        Clear(True),
        Stream("stdout", "z"),
        None,
    )
    assert left.sizes == (1 + 3, 1 + 6, display, clear, 1 + 1, LARGEST_DISPLAY + 1)


def test_only_what_was_not_taken_is_found(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    unsent.write("stdout", "taken")
    unsent.write("stdout", "not")
    unsent.acknowledge(6)
    assert read(area) == CrashOutput("c", 6, (Stream("stdout", "not"),), (3,))
    unsent.begin("d", 1 << 20)
    assert read(area) == CrashOutput("d")


def test_the_count_follows_the_one_that_messages_have(area: int) -> None:
    """An interrupt between two steps of a write may have led it astray."""
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    unsent.write("stdout", "written but never queued")
    unsent.set_total(10)
    unsent.write("stdout", "next")
    left = read(area)
    assert left is not None
    assert left.total == 14
    assert text_of(left.after(10)) == "next"


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text(min_size=1, max_size=9)), min_size=1),
    st.integers(0, SLACK // 3),
)
def test_the_newest_is_found_whole_when_the_ring_was_full(writes: list[tuple[str, str]], fill: int) -> None:
    area = make_area()
    try:
        unsent = CrashRing(area)
        window = 1 << 16
        unsent.begin("c", window)
        counts: list[int] = []
        for stream, text in [
            ("stdout", "é" * (SLACK // 2)),
            ("stderr", "-" * (SLACK - fill)),
            *writes,
        ]:
            clean = text.encode("utf-8", "replace").decode()
            counts.append(unsent.write(stream, clean))
        total = sum(counts)
        left = read(area)
        assert left is not None
        assert left.total == total
        assert total - left.before >= min(total, window)
        newest = left.after(sum(counts[:2]))
        assert text_of(newest) == "".join(t.encode("utf-8", "replace").decode() for _, t in writes)
        for stream in ("stdout", "stderr"):
            found = "".join(c.text for c in newest.chunks if isinstance(c, Stream) and c.name == stream)
            assert found == "".join(t.encode("utf-8", "replace").decode() for s, t in writes if s == stream)
    finally:
        os.close(area)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.binary(min_size=64, max_size=120), st.integers(0, 2**63 - 1))
def test_whatever_a_crash_has_left_there_is_no_second_one(body: bytes, header: bytes, number: int) -> None:
    area = make_area()
    try:
        unsent = CrashRing(area)
        unsent.begin("c", 1 << 20)
        unsent.append_display(Clear(), 16)
        unsent.write("stdout", "x" * 300)
        os.pwrite(area, body, HEADER)
        read(area)
        os.pwrite(area, number.to_bytes(8, "little"), 8)
        read(area)
        os.pwrite(area, header, 0)
        read(area)
    finally:
        os.close(area)


def test_what_a_long_cell_used_is_given_back(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c", LARGEST)
    for _ in range(2 * LARGEST >> 20):
        unsent.write("stdout", "x" * (1 << 20))
    assert os.fstat(area).st_blocks * 512 >= LARGEST
    unsent.begin("d", LARGEST)
    assert os.fstat(area).st_blocks * 512 <= 2 * HEADER


def test_what_was_taken_out_of_a_pipe_is_found_until_it_is_written(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        unsent.splice_in("stderr", reader, 100)
    raw = "grün".encode()
    os.write(writer, raw[:3])
    assert unsent.splice_in("stderr", reader, 100) == raw[:3]
    assert unread(area) == {"stdout": b"", "stderr": raw[:3]}
    unsent.append_spliced("stderr", "gr", 3, raw[2:3])
    assert unread(area) == {"stdout": b"", "stderr": raw[2:3]}
    assert read(area) == CrashOutput("c", 0, (Stream("stderr", "gr"),), (1 + 2,))
    unsent.write("stdout", "printed")
    os.write(writer, raw[3:])
    assert unsent.splice_in("stderr", reader, 100) == raw[3:]
    assert unread(area) == {"stdout": b"", "stderr": raw[2:]}
    unsent.append_spliced("stderr", "ün", 2, b"")
    assert unread(area) == {"stdout": b"", "stderr": b""}
    assert text_of(read(area)) == "grprintedün"
    os.close(reader)
    os.close(writer)


def test_what_an_interrupt_left_landed_is_taken_next(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.write(writer, b"first")
    assert unsent.splice_in("stdout", reader, 100) == b"first"
    os.write(writer, b"second")
    with pytest.raises(BlockingIOError):
        unsent.splice_in("stderr", reader, 100)
    assert unsent.splice_in("stdout", reader, 100) == b"first"
    unsent.append_spliced("stdout", "first", 5, b"")
    assert unsent.splice_in("stdout", reader, 3) == b"sec"
    assert unread(area)["stdout"] == b"sec"
    os.close(reader)
    os.close(writer)


def test_a_text_goes_on_behind_one_of_its_stream_from_a_pipe_without_a_mark(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    assert unsent.write("stdout", "a") == 1 + 1
    for text, counted in (("b", 1), ("c", 1)):
        os.write(writer, text.encode())
        assert unsent.splice_in("stdout", reader, 100) == text.encode()
        assert unsent.append_spliced("stdout", text, 1, b"") == counted
    assert unsent.write("stdout", "d") == 1
    assert read(area) == CrashOutput("c", 0, (Stream("stdout", "abcd"),), (1 + 4,))
    os.close(reader)
    os.close(writer)


PIECES = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["stdout", "stderr"]),
            st.sampled_from(["x", "ü", "€uro", "z" * 1000, "y" * (MARK_EVERY // 2)]),
        ),
        st.tuples(st.just("display"), st.sampled_from(["", "u" * 100])),
    ),
    min_size=1,
    max_size=50,
)


@settings(deadline=None, max_examples=50)
@given(PIECES)
def test_the_count_covers_the_bytes_in_the_ring(pieces: list[tuple[str, str]]) -> None:
    area = make_area()
    try:
        unsent = CrashRing(area)
        unsent.begin("c", LARGEST)
        counts = [
            unsent.append_display(Display({"text/plain": text}, {}), len(text))
            if kind == "display"
            else unsent.write(kind, text)
            for kind, text in pieces
        ]
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        in_ring = int.from_bytes(os.pread(area, 8, 0), "little")
        assert in_ring <= ends[-1] * (1 + 2 / MARK_EVERY) + 1
        left = read(area)
        assert left is not None
        assert (left.before, left.total) == (0, ends[-1])
        for (kind, text), end in zip(pieces, [0, *ends], strict=False):
            first = left.after(end).chunks[0]
            if kind == "display":
                assert first == Display({"text/plain": text}, {})
            else:
                assert isinstance(first, Stream)
                assert first.name == kind
                assert first.text.startswith(text)
    finally:
        os.close(area)


def test_a_display_with_more_data_than_its_estimate_says_is_counted_and_not_kept(area: int) -> None:
    """A plot as JSON, which is no text: it was larger than the ring."""
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    plot = Display({"application/vnd.plotly.v1+json": {"data": list(range(1 << 22))}}, {})
    before = unsent.write("stdout", "before")
    counted = unsent.append_display(plot, 64)
    assert counted > LARGEST
    after = unsent.write("stdout", "after")
    assert read(area) == CrashOutput(
        "c", 0, (Stream("stdout", "before"), None, Stream("stdout", "after")), (before, counted, after)
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda unsent: unsent.write("stderr", "E"),
        lambda unsent: unsent.write("stdout", "R" * MARK_EVERY),
        lambda unsent: unsent.append_display(Clear(), 16),
    ],
    ids=["the stream changes", "the mark is repeated", "a display"],
)
def test_an_interrupt_anywhere_leaves_later_text_with_its_own_stream(
    area: int, write: Callable[[CrashRing], object]
) -> None:
    step, interrupted = 0, True
    while interrupted:
        step += 1
        unsent = CrashRing(area)
        unsent.begin("c", 1 << 20)
        unsent.write("stdout", "before")
        interrupted = interrupted_at(step, lambda: write(unsent))  # noqa: B023  # called at once
        unsent.write("stdout", "out")
        unsent.write("stderr", "err")
        left = read(area)
        assert left is not None
        *_, out, err = left.chunks
        assert isinstance(out, Stream)
        assert (out.name, out.text[-3:], err) == ("stdout", "out", Stream("stderr", "err"))
    assert step > 20


def test_an_interrupt_at_the_begin_of_a_cell_leaves_no_place_of_the_cell_before(area: int) -> None:
    unsent = CrashRing(area)
    step, interrupted = 0, True
    while interrupted:
        step += 1
        unsent.begin("c", 1)
        for _ in range(5):  # around the ring
            unsent.write("stdout", "-" * (SLACK // 4))
        head = os.pread(area, 8, 0)
        interrupted = interrupted_at(step, lambda: unsent.begin("d", 1 << 20))
        if os.pread(area, 8, 0) != head:
            assert unsent.write("stdout", "text") == 1 + 4
            assert os.pread(area, 5, HEADER) == b"\xfetext"
    assert step > 20


def interrupted_at(step: int, work: Callable[[], object]) -> bool:
    """Call ``work``, with a KeyboardInterrupt before so many instructions of the ring. Return whether it had that many."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != unsent_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == step:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_parts_of_texts_can_be_left_out() -> None:
    left = CrashOutput("c", 10, (Stream("stdout", "aé"), None, Stream("stderr", "xyz")), (3, 100, 3))
    assert left.after(0) == left
    assert left.after(11) == CrashOutput(
        "c", 11, (Stream("stdout", "é"), None, Stream("stderr", "xyz")), (2, 100, 3)
    )
    assert left.after(50) == CrashOutput("c", 113, (Stream("stderr", "xyz"),), (3,))
    assert left.after(1000) == CrashOutput("c", 116)


def test_the_mark_before_a_text_is_left_out_with_the_text_before_it() -> None:
    left = CrashOutput("c", 10, (Stream("stdout", "a"), Stream("stderr", "xyz")), (1 + 1, 1 + 3))
    assert left.after(12) == CrashOutput("c", 12, (Stream("stderr", "xyz"),), (1 + 3,))
    assert left.after(13) == CrashOutput("c", 13, (Stream("stderr", "xyz"),), (3,))
    assert left.after(14) == CrashOutput("c", 14, (Stream("stderr", "yz"),), (2,))
    assert left.after(16) == CrashOutput("c", 16)

"""Rank's output as found after its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.kernel_ext.wire import crash_ring as unsent_module
from hvdlab.kernel_ext.wire.cells import Clear, CrashOutput, Display, Stream
from hvdlab.kernel_ext.wire.crash_ring import HEADER, LARGEST, LARGEST_DISPLAY, SLACK, CrashRing, make_area


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
    unsent.append_display(shown, 20)
    unsent.append_display(Clear(True), 16)
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
    assert left.sizes == (3, 6, 20, 16, 1, LARGEST_DISPLAY + 1)


def test_only_what_was_not_taken_is_found(area: int) -> None:
    unsent = CrashRing(area)
    unsent.begin("c", 1 << 20)
    unsent.write("stdout", "taken")
    unsent.write("stdout", "not")
    unsent.acknowledge(5)
    assert read(area) == CrashOutput("c", 5, (Stream("stdout", "not"),), (3,))
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
        total = 0
        for stream, text in [
            ("stdout", "é" * (SLACK // 2)),
            ("stderr", "-" * (SLACK - fill)),
            *writes,
        ]:
            clean = text.encode("utf-8", "replace").decode()
            unsent.write(stream, clean)
            total += len(clean.encode())
        left = read(area)
        assert left is not None
        assert left.total == total
        assert total - left.before >= min(total, window)
        newest = left.after(total - sum(len(t.encode("utf-8", "replace")) for _, t in writes))
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
    assert read(area) == CrashOutput("c", 0, (Stream("stderr", "gr"),), (2,))
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


def test_parts_of_texts_can_be_left_out() -> None:
    left = CrashOutput("c", 10, (Stream("stdout", "aé"), None, Stream("stderr", "xyz")), (3, 100, 3))
    assert left.after(0) == left
    assert left.after(11) == CrashOutput(
        "c", 11, (Stream("stdout", "é"), None, Stream("stderr", "xyz")), (2, 100, 3)
    )
    assert left.after(50) == CrashOutput("c", 113, (Stream("stderr", "xyz"),), (3,))
    assert left.after(1000) == CrashOutput("c", 116)

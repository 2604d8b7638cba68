"""The file of a trace: good JSON when closed, readable when not, and never in the way of its feeder."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.tracing.chrome_trace import ChromeTrace
from hvdlab.collectives.tracing.record_format import CellBeginEvent, Metric, decode, encode
from hvdlab.collectives.tracing.timeline_file import TimelineFile
from hvdlab.runner.check_trace import check, load
from support.patience import PATIENCE
from support.timeline_traces import steps

CHILD = """
import sys
from support.timeline_traces import steps
from hvdlab.collectives.tracing.timeline_file import TimelineFile

trace = TimelineFile.start(sys.argv[1], hold=0.05)
for seed in range(10**9):
    for rank, data in steps(2, 20, seed=seed):
        trace.feed(rank, data)
    # Pace: go on only when the thread has taken most of it.
    while trace._queue.qsize() > 10:
        trace._thread.join(0.001)
"""


def write(path: Path, ranks: int = 3, count: int = 5) -> int:
    """Write a trace; returns how many spans are in it."""
    trace = TimelineFile.start(path)
    spans = 0
    for rank, data in steps(ranks, count):
        spans += sum(type(event).__name__ == "Span" for event in decode(data).events)
        trace.feed(rank, data)
    trace.close()
    assert trace.dropped == 0
    return spans


def test_a_closed_file_is_strict_json_with_every_span(tmp_path: Path) -> None:
    spans = write(tmp_path / "trace.json")
    events = load((tmp_path / "trace.json").read_text())
    assert check(events) == []
    assert sum(event["name"] == "NEGOTIATE_ALLREDUCE" and event["ph"] == "b" for event in events) == spans


def test_an_empty_trace_is_strict_json(tmp_path: Path) -> None:
    TimelineFile.start(tmp_path / "trace.json").close()
    assert load((tmp_path / "trace.json").read_text()) == []


def test_a_file_cut_anywhere_loses_only_its_last_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "trace.json"
    write(path, 2, 1)
    text = path.read_text()
    whole = load(text)

    @given(st.integers(1, len(text)))
    def cut(length: int) -> None:
        events = load(text[:length], killed=True)
        lines = text[:length].count("\n")
        assert events == whole[: len(events)]
        assert len(events) >= min(lines - 1, len(whole))
        assert check(events, killed=True) == []

    cut()


def start_child(path: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path)], env=environment, stderr=subprocess.PIPE)


def wait_for_lines(path: Path, child: subprocess.Popen[bytes], lines: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert child.poll() is None, child.stderr and child.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_process_leaves_a_trace_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with start_child(path) as child:
        wait_for_lines(path, child, 2000)
        child.kill()
    events = load(path.read_text(), killed=True)
    assert len(events) > 1900
    assert check(events, killed=True) == []


def test_an_interrupted_process_leaves_a_complete_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with start_child(path) as child:
        wait_for_lines(path, child, 2000)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=PATIENCE)
    assert b"KeyboardInterrupt" in stderr
    assert check(load(path.read_text())) == []


def test_a_stuck_disk_never_blocks_who_feeds_and_the_loss_is_in_the_trace(tmp_path: Path) -> None:
    fifo = tmp_path / "trace.json"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    trace = TimelineFile(fifo, queued_bytes=1_000_000)
    batch = encode(0, [Metric("loss", number, number, number) for number in range(2000)])
    for _ in range(200):  # as long as it does not read, one that waits for the disk has no end
        trace.feed(0, batch)
    assert trace.dropped > 0
    dropped = trace.dropped
    with pytest.raises(TimeoutError):
        trace.close(timeout=0.05)
    os.set_blocking(reader, True)
    closer = threading.Thread(target=trace.close)
    closer.start()
    with open(reader, encoding="utf-8") as stream:
        events = load(stream.read())
    closer.join()
    assert [event["args"] for event in events if event["name"] == "BATCHES_DROPPED"] == [{"batches": dropped}]


def test_a_full_disk_is_reported_by_close_and_feeding_goes_on() -> None:
    trace = TimelineFile(Path("/dev/full"), queued_bytes=20_000)
    for rank, data in steps(2, 20):
        trace.feed(rank, data)
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as caught:
            trace.close()
        assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_fills_up_leaves_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    script = CHILD.replace("for seed in range(10**9)", "for seed in range(3)") + "\ntrace.close()\n"
    limit = 100_000

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=environment,
        preexec_fn=lower,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert b"File too large" in done.stderr
    events = load(path.read_text())
    assert len(events) > 100
    assert check(events, killed=True) == []


def test_what_is_not_a_batch_is_counted_and_the_rest_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TimelineFile.start(path)
    trace.feed(0, b"garbage")
    trace.feed(1, encode(0, [CellBeginEvent("1", 5)]))
    trace.feed(0, encode(0, [CellBeginEvent("2", 7)]))
    trace.close()
    events = load(path.read_text())
    assert check(events) == []
    assert [event["args"]["batches"] for event in events if event["name"] == "BATCHES_NOT_READABLE"] == [2]
    assert [event["ph"] for event in events if event["name"] == "CELL 2"] == ["B", "E"]


def test_what_is_held_is_written_when_its_time_has_come_without_a_close(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TimelineFile.start(path, hold=0.05)
    for rank, data in steps(2, 1, known_size=False):
        trace.feed(rank, data)
    deadline = time.monotonic() + PATIENCE
    while b"ALLREDUCE" not in path.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    trace.close()


def test_close_can_be_called_again_and_later_batches_are_ignored(tmp_path: Path) -> None:
    trace = TimelineFile.start(tmp_path / "trace.json")
    trace.close()
    size = trace.path.stat().st_size
    trace.feed(0, encode(0, [CellBeginEvent("1", 5)]))
    trace.close()
    assert trace.path.stat().st_size == size


def test_a_file_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TimelineFile.start(tmp_path / "missing" / "trace.json")


def test_the_file_holds_what_the_converter_gave(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path)
    trace = ChromeTrace()
    expected = [event for _, data in steps(3, 5) for event in trace.feed(decode(data), 0.0)]
    written = load(path.read_text())
    zero = written[0]["args"].pop("start_time_since_epoch_in_micros")
    assert abs(zero / 1e6 + time.monotonic() - time.time()) < 10
    assert written == expected + trace.close()


def test_an_error_of_the_conversion_is_raised_by_close_and_nothing_piles_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TimelineFile.start(tmp_path / "trace.json")
    monkeypatch.setattr(file._trace, "feed", lambda *_: 1 / 0)
    for rank, data in steps(2, 20):
        file.feed(rank, data)
    with pytest.raises(ZeroDivisionError):
        file.close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []

"""Records of a pool's ranks, as the process that started the pool reads it."""

from __future__ import annotations

import gzip
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.tracing.record_format import Span, decode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.runner.check_trace import check, load
from support.patience import PATIENCE, eventually

SETUP = """\
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
def late(seconds):
    import time
    hvd.barrier()
    if context.engine().rank == 2:
        time.sleep(seconds)
    return hvd.allreduce(np.ones(3), "loss")
"""


@pytest.fixture
def pool(surroundings: Path) -> Iterator[Pool]:
    with Pool.start(3) as pool:
        assert not pool.run(SETUP).errors
        yield pool


def wait_for_rows(pool: Pool, name: str, count: int) -> None:
    """Wait until the notebook has this many rows of a tensor: ranks send their records at intervals."""
    recording, deadline = pool.client.recording, Deadline(PATIENCE)
    while True:
        version = recording.version
        if sum(pool.trace()["name"] == name) >= count:
            return
        assert recording.wait(version, timeout=deadline.remaining()), f"no {count} rows of {name}"


def test_what_ranks_have_done_is_there_when_it_is_asked_for(pool: Pool, tmp_path: Path) -> None:
    seldom = "from hvdlab.collectives.engine.span_log import SpanLog\nSpanLog.INTERVAL = 3600.0"
    assert not pool.run(seldom).errors
    assert len(pool.trace()) == 0  # the history, and the records that were to be sent before
    for count in range(1, 4):
        assert not pool.run("hvd.allreduce(np.ones(3), 'here')").errors
        assert sum(pool.trace()["name"] == "here") == 3 * count
    assert not pool.run("hvd.allreduce(np.ones(3), 'there'); context.engine().metric('loss', 2.5)").errors
    assert sum(pool.metrics()["name"] == "loss") == 3
    assert not pool.run("hvd.allreduce(np.ones(3), 'last')").errors
    saved = gzip.decompress(pool.save_trace(tmp_path / "t.json.gz").read_bytes()).decode()
    assert saved.count("allreduce.last") >= 3


def test_ranks_that_did_not_answer_are_named(pool: Pool, tmp_path: Path) -> None:
    assert not pool.run("hvd.allreduce(np.ones(3), 'here')").errors
    assert pool.client.gathered(PATIENCE).silent == ()
    stopped = pool.status()[1].pid
    threads = Path(f"/proc/{stopped}/task")
    os.kill(stopped, signal.SIGSTOP)
    try:
        # The thread that gets the signal stops the others, and one of them could answer before.
        eventually(lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()))
        assert 1 in pool.trace().attrs["silent"]
        assert 1 in pool.metrics().attrs["silent"]
        pool.save_trace(tmp_path / "t.json")
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert any("did not answer" in line for line in pool.news())


def test_a_recording_may_wait_for_its_pool(pool: Pool) -> None:
    recording = Recording()
    pool.client.adopt(recording)
    assert pool.client.recording is recording
    assert not pool.run("hvd.allreduce(np.ones(3), 'here')", label="[7]").errors
    assert sum(pool.trace()["name"] == "here") == 3
    assert recording.count >= 3
    assert {mark.text for mark in recording.annotations() if mark.kind == "cell"} >= {"[7]"}
    pool.client.adopt(Recording())
    assert pool.client.recording is recording


def test_spans_tell_which_line_of_which_cell_they_are_of(pool: Pool) -> None:
    # Above the source are a line with the cell's magic, and here an empty one.
    assert not pool.run("x = 1\nhvd.allreduce(np.ones(3), 'here')", label="[7]", line_offset=2).errors
    assert not pool.run("hvd.allreduce(np.ones(3), 'here')\nlate(0)", label="[8]").errors
    wait_for_rows(pool, "here", 6)
    wait_for_rows(pool, "loss", 3)
    table = pool.trace()
    here = table[table["name"] == "here"]
    assert here.groupby("site", observed=True)["rank"].apply(sorted).to_dict() == {
        "cell [7] line 4": [0, 1, 2],
        "cell [8] line 1": [0, 1, 2],
    }
    (inner,) = set(table[table["name"] == "loss"]["site"])
    assert inner.endswith(" line 10"), "the line that calls it, not the one that calls that"


def test_a_timeline_s_file_does_not_cost_the_recording_its_history(pool: Pool, tmp_path: Path) -> None:
    """The coordinator sends the history once, to the first listener."""
    assert not pool.run("hvd.allreduce(np.ones(3), 'early')").errors
    pool.client.collect_events(PATIENCE)  # the coordinator has its span
    path = pool.start_timeline(tmp_path / "later.json")
    assert not pool.run("hvd.allreduce(np.ones(3), 'late')").errors
    pool.stop_timeline()
    wait_for_rows(pool, "late", 3)
    assert sum(pool.trace()["name"] == "early") == 3
    tensors = {event["args"].get("tensor") for event in load(path.read_text()) if "args" in event}
    assert "late" in tensors
    assert "early" not in tensors, "a file has what comes from its start on"


def test_what_was_recorded_is_saved_afterwards(pool: Pool, tmp_path: Path) -> None:
    assert not pool.run("for _ in range(20): late(0)", label="[9]").errors
    assert pool.run("1/0", label="[10]").errors
    path = pool.save_trace(tmp_path / "run.json")
    events = load(path.read_text())
    assert check(events) == []
    ran = [event for event in events if event["name"] == "ALLREDUCE"]
    assert sorted(event["pid"] for event in ran) == [0] * 20 + [1] * 20 + [2] * 20
    cells = [(e["args"]["cell"], e["ph"]) for e in events if e.get("cat") == "cells" and e["ph"] == "B"]
    assert cells.count(("[9]", "B")) == cells.count(("[10]", "B")) == 3
    compressed = pool.save_trace(str(tmp_path / "run.json.gz"))
    assert {e["name"] for e in load(gzip.decompress(compressed.read_bytes()).decode())} >= {"ALLREDUCE"}
    assert compressed.stat().st_size < path.stat().st_size / 5
    with pytest.raises(InvalidRequestError, match=r"`run\.txt` says no format .* \.json\.gz"):
        pool.save_trace(tmp_path / "run.txt")
    with pytest.raises(FileNotFoundError):
        pool.save_trace(tmp_path / "nowhere" / "run.json")
    names = ["run.json", "run.json.gz"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(("run", ".run"))) == names


LATE = 0.08  # seconds for which rank 2 sleeps in each round; on a busy machine another one may be the last all the same
ROUNDS = 6
TRUTH = f"""\
import time
came, done = [], []
for step in range({ROUNDS}):
    hvd.barrier()
    if context.engine().rank == 2: time.sleep({LATE})
    came.append(time.monotonic_ns())
    hvd.allreduce(np.ones(3), "truth")
    done.append(time.monotonic_ns())
"""


def test_the_late_rank_is_as_late_everywhere_as_the_ranks_own_clocks_say(pool: Pool, tmp_path: Path) -> None:
    """The stream, the table, and the file have one and the same arrival of each rank, between its own two looks."""
    streamed: dict[int, list[Span]] = {rank: [] for rank in range(3)}

    def listen(rank: int, batch: bytes) -> None:
        events = decode(batch).events
        streamed[rank] += [e for e in events if isinstance(e, Span) and e.name == "truth"]

    assert pool.trace() is not None  # the history is the recording's
    pool.client.on_events(listen)
    assert not pool.run(TRUTH).errors
    came, done = pool.pull("came"), pool.pull("done")
    events = load(pool.save_trace(tmp_path / "run.json").read_text())
    table = pool.trace().query("name == 'truth'").sort_values("arrival")

    arrivals = {rank: [span.submitted_ns for span in spans] for rank, spans in streamed.items()}
    for rank in range(3):
        for before, arrival, after in zip(came[rank], arrivals[rank], done[rank], strict=True):
            assert before <= arrival <= after
        begun = [
            e for e in events if e["ph"] == "b" and e["pid"] == rank and e["args"].get("tensor") == "truth"
        ]
        assert [round(event["ts"] * 1000) for event in begun] == arrivals[rank]
        # Arrival to end is the time on the rank's clock, less the call's own work before and behind.
        wall = sum(done[rank]) - sum(came[rank])
        own = table[table["rank"] == rank]
        assert sum(span.finished_ns - span.submitted_ns for span in streamed[rank]) <= wall
        assert float((own["waiting"] + own["queued"] + own["duration"]).sum()) * 1e9 <= wall + 1

    rounds = [{rank: arrivals[rank][i] for rank in range(3)} for i in range(ROUNDS)]
    lasts = [max(each, key=each.__getitem__) for each in rounds]
    for i, last in enumerate(lasts):
        assert min(done[rank][i] for rank in range(3)) >= came[last][i], "each waited for the last one"
    assert table["last_rank"].tolist() == [last for last in lasts for _ in range(3)]
    assert table["certain"].all()
    for rank in range(3):
        lateness = table.loc[table["rank"] == rank, "lateness"]
        late = [each[rank] - min(each.values()) for each in rounds]
        assert (lateness * 1e9).round().astype(int).tolist() == late
    marks = [e for e in events if e["name"] == "LAST_ARRIVAL" and e["args"]["tensor"] == "truth"]
    told = [(mark["args"]["last_rank"], round(mark["args"]["spread_us"] * 1000)) for mark in marks]
    assert told == [
        (last, max(each.values()) - min(each.values())) for last, each in zip(lasts, rounds, strict=True)
    ]
    assert [round(mark["ts"] * 1000) for mark in marks] == [max(each.values()) for each in rounds]
    titles = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(mark["tid"], f"rank {last} was last") for mark, last in zip(marks, lasts, strict=True)} <= titles

"""Sampling of a rank's process, without and with a world."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Self

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.metrics import sampler
from hvdlab.collectives.metrics.sampler import ProcessUsage, Sampler, Source, Thinning, Values
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.tracing.recording import Recording
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

SECOND = 1_000_000_000
Recorded = tuple[str, float, None, int]


# -- a process ----------------------------------------------------------------------------------------------------


def test_processor_time_is_that_of_the_process() -> None:
    before = time.monotonic(), time.process_time()
    usage = ProcessUsage()
    begin, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.2:
        pass
    # Its measurement lies between these, even if the process is kept waiting at any of them.
    least, shortest = time.process_time() - used, time.monotonic() - begin
    found = dict(usage.sample())["hvdlab/cpu"]
    longest, most = time.monotonic() - before[0], time.process_time() - before[1]
    assert 100 * least / longest <= found * 1.001
    assert found <= 100 * most / shortest * 1.001


def test_idle_time_counts_as_such() -> None:
    usage = ProcessUsage()
    time.sleep(0.2)
    assert dict(usage.sample())["hvdlab/cpu"] < 50


def test_memory_that_is_touched_is_seen() -> None:
    usage = ProcessUsage()
    before = dict(usage.sample())["hvdlab/rss"]
    block = np.ones(64 << 20, np.uint8)
    after = dict(usage.sample())["hvdlab/rss"]
    assert after - before == pytest.approx(block.nbytes, rel=0.1)


def test_threads_are_counted() -> None:
    usage, end = ProcessUsage(), threading.Event()
    before = dict(usage.sample())["hvdlab/threads"]
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert dict(usage.sample())["hvdlab/threads"] == before + 1
    end.set()
    thread.join()


# -- which are recorded -------------------------------------------------------------------------------------------


def test_what_hardly_changes_is_recorded_now_and_then() -> None:
    thinning = Thinning(10 * SECOND)
    values = [("hvdlab/cpu", 0.3), ("hvdlab/rss", 1e9)]
    almost = [("hvdlab/cpu", 1.1), ("hvdlab/rss", 1e9 + 4096)]
    wanted = [thinning.wanted(almost if at % 2 else values, at * SECOND) for at in range(100, 120)]
    assert [at for at, one in enumerate(wanted) if one] == [0, 10]


@pytest.mark.parametrize(
    "values",
    [
        [("hvdlab/cpu", 1.4), ("hvdlab/rss", 1e9), ("hvdlab/threads", 7.0)],
        [("hvdlab/cpu", 0.3), ("hvdlab/rss", 1e9 + (2 << 20)), ("hvdlab/threads", 7.0)],
        [("hvdlab/cpu", 0.3), ("hvdlab/rss", 1e9), ("hvdlab/threads", 8.0)],
        [("hvdlab/cpu", 0.3), ("hvdlab/rss", 1e9), ("hvdlab/gpu0/memory", 7.0)],
        [("hvdlab/cpu", 0.3), ("hvdlab/rss", 1e9)],
    ],
)
def test_what_changes_is_recorded_at_once(values: Values) -> None:
    thinning = Thinning(10 * SECOND)
    first = [("hvdlab/cpu", 0.3), ("hvdlab/rss", 1e9), ("hvdlab/threads", 7.0)]
    assert thinning.wanted(first, 100 * SECOND)
    assert thinning.wanted(values, 101 * SECOND)


def test_slow_change_adds_up() -> None:
    thinning = Thinning(10**6 * SECOND)
    assert [thinning.wanted([("hvdlab/cpu", at / 2)], at * SECOND + 10**18) for at in range(7)] == [
        True, False, False, True, False, False, True
    ]  # fmt: skip


# -- the thread ---------------------------------------------------------------------------------------------------


class Counting:
    """Source whose value is the number of the sample."""

    def __init__(self, name: str = "count", fails_at: int = -1) -> None:
        self.name, self.fails_at = name, fails_at
        self.count = 0
        self.closed = threading.Event()

    def sample(self) -> Values:
        self.count += 1
        if self.count == self.fails_at:
            raise OSError("unplugged")
        return [(self.name, float(self.count))]

    def close(self) -> None:
        self.closed.set()


class Sampling:
    """Sampler of these sources, whose records are waited for."""

    def __init__(self, *sources: Source, interval: float = 0.02) -> None:
        self.records: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
        # Until the end: the sampler looks for its sources on its own thread.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(sampler, "find_sources", lambda: list(sources))
        self.sampler = Sampler(lambda *one: self.records.put(one), interval, "test")

    def take(self, count: int) -> list[Recorded]:
        return [self.records.get(timeout=PATIENCE) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close(10)
        self._patch.undo()


def test_samples_come_until_it_is_closed() -> None:
    source = Counting()
    with Sampling(source) as sampling:
        records = sampling.take(4)
    assert [value for _, value, _, _ in records] == [1, 2, 3, 4]
    assert not [t for t in threading.enumerate() if t.name == "hvdlab-metrics-test"]
    assert source.closed.is_set()


def test_samples_are_no_nearer_than_the_interval() -> None:
    with Sampling(Counting(), interval=0.05) as sampling:
        times = [at for _, _, _, at in sampling.take(5)]
    # Each is due an interval after the one before was due; a late one does not draw the next one nearer than its due time.
    assert times[-1] - times[0] >= 3.5 * 0.05 * SECOND


def test_all_values_of_a_sample_have_one_time() -> None:
    with Sampling(Counting("a"), Counting("b")) as sampling:
        records = sampling.take(4)
    assert [name for name, *_ in records] == ["a", "b", "a", "b"]
    assert records[0][3] == records[1][3] < records[2][3] == records[3][3]


def test_a_source_that_fails_is_given_up_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad = Counting("bad", fails_at=2)
    with caplog.at_level(logging.WARNING), Sampling(bad, Counting("good")) as sampling:
        records = sampling.take(5)
        assert bad.closed.is_set()
    assert [name for name, *_ in records] == ["bad", "good", "good", "good", "good"]
    assert [record.getMessage() for record in caplog.records] == [
        "Counting is not sampled any more: unplugged"
    ]


def test_it_ends_when_nothing_is_left_to_sample() -> None:
    with Sampling() as sampling:
        sampling.sampler._thread.join(PATIENCE)
        assert not sampling.sampler._thread.is_alive()


# -- in a world ---------------------------------------------------------------------------------------------------


sampled = resident_ranks(2, env={"HVDLAB_METRICS_INTERVAL": "0.05"}, scope="function")


def newest(recording: Recording) -> dict[tuple[int, str], float]:
    """Return the newest value of each metric that is not derived from spans, by rank and name."""
    found = {}
    for one in recording.series():
        points = recording.points(one.rank, one.name)
        if len(points) and one.name in ("hvdlab/cpu", "hvdlab/rss", "hvdlab/threads"):
            found[one.rank, one.name] = float(points["value"][-1])
    return found


def test_ranks_send_what_their_processes_use(sampled: Ranks) -> None:
    with Client.connect(sampled.coordinator.address, sampled.coordinator.client_token) as client:
        recording, deadline = client.recording, Deadline(PATIENCE)
        version = recording.version
        while len(newest(recording)) < 6:
            assert recording.wait(version, timeout=deadline.remaining())
            version = recording.version
        found = newest(recording)
    assert set(found) == {(r, f"hvdlab/{name}") for r in (0, 1) for name in ("cpu", "rss", "threads")}
    assert all(found[r, "hvdlab/rss"] > 10e6 for r in (0, 1))
    assert all(found[r, "hvdlab/threads"] >= 3 for r in (0, 1))


def sampler_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdlab-metrics")]


@pytest.mark.parametrize("variable", ["HVDLAB_METRICS_INTERVAL", "HVDLAB_RECORD"])
def test_it_can_be_switched_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0")
    context.init()
    assert sampler_threads() == []
    hvd.metric("loss", 1.0)  # harmless either way
    context.shutdown()


def test_it_begins_with_the_world_and_ends_with_it() -> None:
    context.init()
    assert sampler_threads() == ["hvdlab-metrics-0"]
    context.shutdown()
    assert sampler_threads() == []


def test_a_forked_child_does_not_sample() -> None:
    context.init()
    child = os.fork()
    if child == 0:
        os._exit(len(sampler_threads()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    context.shutdown()


def test_a_moment_without_descriptors_leaves_a_sample_out(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = ProcessUsage()
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "process_status", lambda pid: [])
        assert usage.sample() == []
    assert len(usage.sample()) == 3

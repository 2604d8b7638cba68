"""The simulation behind docs/design/scale.md: it counts the messages sent, and the page has its results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.simulation.timed_job import Network, TimedJob, memory_of_root

ROOT = Path(__file__).parents[4]
SIZE = 40


@pytest.fixture
def job() -> TimedJob:
    job = TimedJob(SIZE)
    job.form()
    return job


def test_agreement_takes_one_message_from_each_rank_and_one_to_each(job: TimedJob) -> None:
    job.step(("loss",))
    step = job.step(("loss",))
    assert (step.root.frames_in, step.root.frames_out) == (SIZE, SIZE)
    assert (step.leaf.frames_in, step.leaf.frames_out) == (1, 1)
    assert step.root.bytes_in == SIZE * step.leaf.bytes_out


def test_tensors_that_are_submitted_together_are_one_message(job: TimedJob) -> None:
    names = [f"layer{number}" for number in range(30)]
    job.step(names)
    assert job.step(names).root.frames == 2 * SIZE


def test_time_is_that_of_what_one_process_does_after_another() -> None:
    network = Network(message=1.0, latency=0.25, bandwidth=1e15)
    job = TimedJob(4, network)
    job.form()
    job.step(("loss",))
    # A rank writes; the coordinator reads the first as one round, then the other three as one, writes to four; the last one reads.
    assert job.step(("loss",)).seconds == pytest.approx(1.0 + 0.25 + 1.0 + 3.0 + 4.0 + 0.25 + 1.0)


def test_what_is_large_takes_longer() -> None:
    fast, slow = (TimedJob(8, Network(bandwidth=bandwidth)).form() for bandwidth in (1e9, 1e6))
    assert fast.root == slow.root
    assert slow.seconds > fast.seconds


def test_a_death_reaches_all_and_all_go_on(job: TimedJob) -> None:
    told, anew = job.kill(7)
    assert 0 < told.seconds < anew
    assert job.step(("loss",)).root.frames_out == SIZE - 1


def test_memory_grows_with_ranks_and_tensors() -> None:
    memory_of_root(1, ("a",))  # permanent state is there from now on
    few, many = tuple(map(str, range(10))), tuple(map(str, range(100)))
    assert memory_of_root(64, few) > 3 * memory_of_root(8, few)
    assert memory_of_root(8, many) > 4 * memory_of_root(8, few)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The benchmarks' modules can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tests"))  # which scale.py does as well, and leaves behind
    import pages
    import scale

    yield pages, scale
    for name in ("pages", "scale"):
        sys.modules.pop(name, None)


def test_the_page_has_what_came_out(benchmarks: tuple[ModuleType, ModuleType]) -> None:
    pages, scale = benchmarks
    assert pages.between(scale.PAGE.read_text(), "scale") == scale.markdown(
        json.loads(scale.RESULT.read_text())
    )


def test_what_came_out_is_what_the_state_machines_do(benchmarks: tuple[ModuleType, ModuleType]) -> None:
    _, scale = benchmarks
    written = json.loads(scale.RESULT.read_text())["ranks"]["64"]
    found = scale.simulate(64)
    assert found.pop("root_memory") > 0  # which versions of Python differ in
    written.pop("root_memory")
    for what, passage in found.items():
        assert passage == pytest.approx(written[what]), f"{what}: run `python benchmarks/scale.py --write`"

"""The simulation behind docs/design/scale.md: that it counts what is sent, and that the page has what came out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from timed_job import Network, TimedJob, memory_of_root

ROOT = Path(__file__).parents[3]
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
    memory_of_root(1, ("a",))  # what is kept once and for all is there from now on
    few, many = tuple(map(str, range(10))), tuple(map(str, range(100)))
    assert memory_of_root(64, few) > 3 * memory_of_root(8, few)
    assert memory_of_root(8, many) > 4 * memory_of_root(8, few)


def test_ranks_behind_one_relay_take_little_more_memory_than_one() -> None:
    memory_of_root(1, ("a",))
    names = tuple(map(str, range(100)))
    assert memory_of_root(64, names) > 4 * memory_of_root(64, names, 16)


def test_with_relays_agreement_takes_one_message_from_each_host_and_one_to_each() -> None:
    job = TimedJob(SIZE, levels=1)
    job.form()
    job.step(("loss",))
    step = job.step(("loss",))
    hosts = math.ceil(SIZE / 16)
    assert (step.root.frames_in, step.root.frames_out) == (hosts, hosts)
    assert (step.leaf.frames_in, step.leaf.frames_out) == (1, 1)


def test_with_relays_above_relays_agreement_takes_one_message_from_each_of_those() -> None:
    job = TimedJob(SIZE, Network(ranks_per_host=4, relays_per_relay=5), levels=2)
    assert len(job.relays) == 10 + 2
    job.form()
    job.step(("loss",))
    assert job.step(("loss", "accuracy")).root.frames == 2 * 2


def test_time_with_relays_is_that_of_what_one_process_does_after_another() -> None:
    job = TimedJob(4, Network(message=1e-4, latency=0.25e-4, bandwidth=1e15, ranks_per_host=2), levels=1)
    job.form()
    job.step(("loss",))
    # A rank writes; its relay reads two and writes one; the coordinator reads the first as one round, then the other one, and writes to two; the
    # second relay reads one and writes to two; the last rank reads.
    up, root, down = 1 + 0.25 + 2 + 1 + 0.25, 1 + 1 + 2, 0.25 + 1 + 2 + 0.25 + 1
    assert job.step(("loss",)).seconds == pytest.approx((up + root + down) * 1e-4)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_death_behind_relays_reaches_all_and_the_others_are_one_again(levels: int) -> None:
    job = TimedJob(SIZE, Network(ranks_per_host=4, relays_per_relay=5), levels)
    job.form()
    job.step(("loss",))
    before = job.step(("loss",)).root
    told, anew = job.kill(7)
    assert 0 < told.seconds < anew
    assert told.root.frames < TimedJob(SIZE).form().root.frames
    job.step(("loss",))
    assert job.step(("loss",)).root.frames == before.frames


def test_a_rank_that_is_late_costs_its_host_one_step() -> None:
    job = TimedJob(SIZE, levels=1)
    job.form()
    job.step(("loss",))
    alone = job.step(("loss",)).root
    late = job.step(("loss",), late={3: 0.01})
    assert late.seconds > 0.01
    assert late.root.frames_in == alone.frames_in + 1, "those that were not late are still one"
    assert job.step(("loss",)).root.frames == alone.frames


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
    page, result = scale.PAGE.read_text(), json.loads(scale.RESULT.read_text())
    assert pages.between(page, "scale") == scale.markdown(result)
    assert pages.between(page, "relays") == scale.relays_markdown(result)


def test_relays_reach_their_goal(benchmarks: tuple[ModuleType, ModuleType]) -> None:
    _, scale = benchmarks
    result = json.loads(scale.RESULT.read_text())
    for size, levels, goal in (("1024", 1, 0.1), ("16384", 2, 0.02)):
        without, relayed = (scale.figures_of(result, n)[size]["tensor"]["seconds"] for n in (0, levels))
        assert relayed <= goal * without


@pytest.mark.parametrize("levels", [0, 1])
def test_what_came_out_is_what_the_state_machines_do(
    benchmarks: tuple[ModuleType, ModuleType], levels: int
) -> None:
    _, scale = benchmarks
    written = scale.figures_of(json.loads(scale.RESULT.read_text()), levels)["64"]
    found = scale.simulate(64, levels)
    assert found.pop("root_memory") > 0  # which versions of Python differ in
    written.pop("root_memory")
    for what, passage in found.items():
        assert passage == pytest.approx(written[what]), f"{what}: run `python benchmarks/scale.py --write`"

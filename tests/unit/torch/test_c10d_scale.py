"""Watched groups on a modelled network: the coordinator's work per rank does not grow with the ranks, and the page has the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from hvdlab.collectives.errors import Disagreement
from hvdlab.torch.c10d.launch_ring import COLLECTIVES, AnyWatchMail, LaunchVerdict, Verdict
from support.timed_watch import PING_AFTER, TimedWatches

ROOT = Path(__file__).parents[3]


def test_a_healthy_watched_group_takes_the_coordinator_a_ping_of_each_rank_and_its_answer() -> None:
    job = TimedWatches(200)
    job.form()
    beats = job.beat(60.0)
    assert 2 * 200 * 0.8 <= PING_AFTER * beats.frames <= 2 * 200


def test_ranks_that_were_heard_at_different_instants_share_liveness_checks() -> None:
    few, many = ((job.form(), job.beat(60.0))[1] for job in (TimedWatches(20), TimedWatches(400)))
    assert many.inspections <= 25 * few.inspections


def test_a_report_names_the_missing_rank_and_takes_each_rank_as_many_bytes_at_any_size() -> None:
    found = []
    for size in (20, 400):
        job = TimedWatches(size)
        job.form()
        report = job.report()
        assert report.missing == (size - 1,)
        assert report.leaf.frames == 5  # late, query, answer, verdict, stand-in
        found.append(report)
    few, many = found
    assert many.root.bytes <= 25 * few.root.bytes
    assert many.leaf.bytes_in <= 1.2 * few.leaf.bytes_in


def test_a_verdict_arrives_as_it_was_sent() -> None:
    parties = (Disagreement((0, 1, 2), "allreduce", "a.py:1"), Disagreement((5,), "barrier", "b.py:2"))
    sites = ("a.py:1", "a.py:1", "", "a.py:1")
    verdict = Verdict((0, 1, 2, 5), sites, (3, 4, 7), parties, "rank 5 skipped a call")
    mail = LaunchVerdict.of("g", 3, COLLECTIVES, 9, verdict, stand_in=True)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(mail), type=AnyWatchMail)
    assert isinstance(read, LaunchVerdict)
    assert read.verdict() == verdict
    assert (read.group, read.generation, read.number, read.stand_in) == ("g", 3, 9, True)


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


def test_the_page_has_what_the_groups_do(benchmarks: tuple[ModuleType, ModuleType]) -> None:
    pages, scale = benchmarks
    written = json.loads(scale.WATCHED.read_text())
    assert pages.between(scale.PAGE.read_text(), "scale_watched") == scale.markdown_of_watched(written)
    found = scale.simulate_watched(64)
    for what, figures in found.items():
        assert figures == pytest.approx(written["ranks"]["64"][what]), (
            f"{what}: run `python benchmarks/scale.py --watched --write`"
        )

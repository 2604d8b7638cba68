"""Figures of the training in which ranks are killed, from steps that are made up, and their place on the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import kills

    yield kills
    for name in ("kills", "recovery", "pages"):
        sys.modules.pop(name, None)


def steps(kills: ModuleType, *spans: tuple[int, int, float, int]) -> list[Any]:
    """Return a step a second from each first number to a last one, from an instant on, of so many ranks."""
    return [
        kills.Step(at + number - first, number, ranks, 1 / number, 100 + rank)
        for first, last, at, ranks in spans
        for number in range(first, last + 1)
        for rank in range(ranks)
    ]


def figures(kills: ModuleType, *spans: tuple[int, int, float, int], until: float) -> dict[str, Any]:
    played = {"steps": sorted(steps(kills, *spans)), "begin": 20.0, "end": until, "postponed": 0}
    found: dict[str, Any] = kills.figures(10, 1, played, steps(kills, (1, 60, 1.0, 3)))
    return found


def test_a_run_that_loses_nothing_is_fully_efficient(kills: ModuleType) -> None:
    found = figures(kills, (1, 60, 1.0, 3), until=60.0)
    assert (found["efficiency"], found["ceiling"], found["ranks_share"]) == (1.0, 0.95, 1.0)
    assert (found["steps"], found["lost_steps"], found["longest_gap_steps"]) == (40, 0, 1.0)
    assert found["loss"] == found["loss_without_kills"]


def test_a_pause_and_a_missing_rank_cost_what_they_last(kills: ModuleType) -> None:
    found = figures(kills, (1, 30, 1.0, 3), (31, 50, 41.0, 2), until=60.0)
    assert found["efficiency"] == 0.75  # 30 steps in 40 seconds
    assert found["longest_gap_steps"] == 11.0
    assert found["ranks_share"] == pytest.approx((10 + 20 * 2 / 3) / 30, abs=1e-4)


def test_steps_that_are_repeated_count_once_and_those_of_a_lost_commit_are_lost(kills: ModuleType) -> None:
    repeated = figures(kills, (1, 30, 1.0, 3), (30, 59, 31.0, 3), until=61.0)
    assert (repeated["steps"], repeated["lost_steps"]) == (39, 0)
    lost = figures(kills, (1, 30, 1.0, 3), (1, 31, 31.0, 3), until=61.0)
    assert (lost["steps"], lost["lost_steps"]) == (11, 29)


def test_the_page_has_the_figures_of_the_kills(kills: ModuleType) -> None:
    import pages

    result = json.loads((ROOT / "benchmarks/results/kills.json").read_text())
    shown = pages.between((ROOT / "docs/reference/faults.md").read_text(), "kills")
    assert shown == kills.markdown(result)


def test_runs_of_one_ratio_are_added_up(kills: ModuleType) -> None:
    calm = figures(kills, (1, 60, 1.0, 3), until=60.0)
    paused = figures(kills, (1, 30, 1.0, 3), (31, 50, 41.0, 2), until=60.0)
    both = kills.in_all([calm, paused])
    assert (both["kills"], both["runs"], both["seconds"], both["steps"]) == (2, 2, 80.0, 70)
    assert both["efficiency"] == pytest.approx(70 / 80)
    assert both["of_the_ceiling"] == pytest.approx(70 / 80 / 0.95)
    assert both["ranks_share"] == pytest.approx((40 + 10 + 20 * 2 / 3) / 70, abs=1e-4)
    assert (both["longest_gap_steps"], both["lost_steps"]) == (11.0, 0)

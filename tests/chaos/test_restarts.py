"""Ranks that are started anew again and again, by a pool that only pretends: the record of one that crashes, and how it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from support.patience import HOUR

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import restarts

    yield restarts
    sys.modules.pop("restarts", None)


class Results(list[float]):
    """Values of a cell without an error."""

    root_cause = None


class PretendedPool:
    """Pool whose restart of rank 2 ends in a crash once."""

    started = 0
    acts: list[str] = []  # noqa: RUF012  # of all pools of a test, which empties it

    def __init__(self) -> None:
        self.size, self.lost = 3, dict[int, str]()

    @classmethod
    def start(cls, ranks: int, *, plane: str) -> PretendedPool:
        cls.started += 1
        return cls()

    def run(self, source: str, ranks: list[int] | None = None) -> Any:
        if ranks is not None:
            self.acts.append(f"kill {ranks[0]}")
            return SimpleNamespace(root_cause=None)
        return Results([3.0] * 3)

    def restart(self, ranks: list[int]) -> None:
        self.acts.append(f"restart {ranks[0]}")
        if ranks == [2] and self.started == 1:
            self.lost = {2: "segmentation fault"}
            raise StartError("rank 2 did not start")

    def repair(self) -> None:
        self.acts.append("repair")

    def last_words(self, rank: int) -> str:
        return f"Fatal Python error of rank {rank}"

    def stop(self) -> None:
        self.acts.append("stop")


@pytest.fixture
def pool(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[PretendedPool]:
    monkeypatch.setattr(PretendedPool, "started", 0)
    monkeypatch.setattr(PretendedPool, "acts", [])
    monkeypatch.setattr(benchmark, "Pool", PretendedPool)
    return PretendedPool


def test_a_crash_is_kept_with_the_last_words_and_a_new_pool_goes_on(
    benchmark: ModuleType, pool: type[PretendedPool]
) -> None:
    result = benchmark.restarts(3, 5, "cpu", time.monotonic() + HOUR)
    assert result["restarts"] == 5
    assert result["crashes"] == [
        {
            "number": 3,
            "rank": 2,
            "error": "StartError: rank 2 did not start",
            "lost": {"2": "segmentation fault"},
            "last_words": {"2": "Fatal Python error of rank 2"},
        }
    ]
    assert pool.acts == ["restart 0", "kill 1", "repair", "restart 2", "stop", "kill 0", "repair", "restart 1", "stop"]  # fmt: skip
    assert pool.started == 2


def test_it_stops_when_its_time_is_over(benchmark: ModuleType, pool: type[PretendedPool]) -> None:
    assert benchmark.restarts(3, 5, "cpu", time.monotonic())["restarts"] == 0
    assert pool.acts == ["stop"]

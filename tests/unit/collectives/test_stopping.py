"""Breakpoints on some ranks, and on a condition."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hvdlab.collectives import stopping


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the debugger's calls; this is rank 2."""
    stops: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda **options: stops.append(options))
    monkeypatch.setattr(stopping, "_rank", lambda: 2)
    return stops


def test_it_stops_on_these_ranks_only(stops: list[dict[str, Any]]) -> None:
    stopping.breakpoint()
    stopping.breakpoint(2)
    stopping.breakpoint(ranks=[1, 2])
    assert len(stops) == 3
    stopping.breakpoint(ranks=range(2))
    stopping.breakpoint(0)
    stopping.breakpoint(ranks=[])
    assert len(stops) == 3


def test_a_condition_is_looked_at_on_these_ranks_only(stops: list[dict[str, Any]]) -> None:
    asked: list[int] = []

    def holds() -> bool:
        asked.append(1)
        return True

    stopping.breakpoint(ranks=[0], when=holds)
    assert (asked, stops) == ([], [])
    stopping.breakpoint(ranks=[2], when=holds, header="look")
    stopping.breakpoint(when=False)
    stopping.breakpoint(when=lambda: 0)
    assert (asked, stops) == ([1], [{"header": "look"}])

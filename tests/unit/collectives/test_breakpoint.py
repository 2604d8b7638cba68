"""Breakpoints on some ranks, and on a condition."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hvdlab.collectives import basics


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the debugger's calls; this is rank 2."""
    stops: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda **options: stops.append(options))
    monkeypatch.setattr(basics, "_own_rank", lambda: 2)
    return stops


def test_it_stops_on_these_ranks_only(stops: list[dict[str, Any]]) -> None:
    basics.breakpoint()
    basics.breakpoint(2)
    basics.breakpoint(ranks=[1, 2])
    assert len(stops) == 3
    basics.breakpoint(ranks=range(2))
    basics.breakpoint(0)
    basics.breakpoint(ranks=[])
    assert len(stops) == 3


def test_a_condition_is_looked_at_on_these_ranks_only(stops: list[dict[str, Any]]) -> None:
    asked: list[int] = []

    def holds() -> bool:
        asked.append(1)
        return True

    basics.breakpoint(ranks=[0], when=holds)
    assert (asked, stops) == ([], [])
    basics.breakpoint(ranks=[2], when=holds, header="look")
    basics.breakpoint(when=False)
    basics.breakpoint(when=lambda: 0)
    assert (asked, stops) == ([1], [{"header": "look"}])

"""Random faults on real pools: a short campaign in the normal run, a thousand faults in the long one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos import census
from chaos.campaign import Campaign, Hang, Mailbox, Sink
from chaos.faults import DEATHS_OF_PARTS, FAULTS, KERNELS, ON_DEVICES, RESIZES, WRAPPED, Fault
from chaos.figures import Outcome, rows, table
from hvdlab.collectives.errors import StartError
from support.patience import PATIENCE
from support.pool_probe import PoolProbe

SLOW = ("stalling", "pausing", "interrupting_deaf", "interrupting_stopped", "flooding")
BRIEF = [fault for fault in (*FAULTS, *DEATHS_OF_PARTS) if fault.play not in SLOW]
"""Faults that take no time."""

OF_PLANE = {
    "shm": BRIEF,
    # With it ranks have torch anyway.
    "gloo": [*BRIEF, *(fault for fault in WRAPPED if fault.deed in ("raise", "skip", "kill"))],
}
"""What a normal run plays."""

ALL = (*FAULTS, *DEATHS_OF_PARTS, *KERNELS, *WRAPPED)


def play(seed: int, plane: str, faults: list[Fault], count: int, **options: Any) -> list[Outcome]:
    """Play a campaign, which gets the options; fail with the whole story of any error."""
    outcomes: list[Outcome] = []
    with Campaign(seed, plane, faults=faults, **options) as campaign:
        outcomes += campaign.play(count)
        left = campaign.stop()
    print(table(rows(outcomes)))
    stories = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not stories, "\n\n".join(stories)
    assert left == []
    return outcomes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("plane", "seed"), [("shm", 11), ("gloo", 12)])
def test_nothing_hangs_and_nothing_is_lost(plane: str, seed: int) -> None:
    faults = OF_PLANE[plane]
    outcomes = play(seed, plane, faults, len(faults))
    assert {outcome.fault for outcome in outcomes} == {fault.name for fault in faults}
    # The delay of the report is checked on a quiet machine (benchmarks/chaos.py); the report itself on any.
    assert all(outcome.report is not None for outcome in outcomes)


VIEWED = ("failing", "dying", "restarting", "interrupting_any", "resizing")
"""Plays with open views in the normal run: each changes in another way what there is to be shown."""


@pytest.mark.timeout(300)
def test_views_that_are_open_show_what_the_recording_has() -> None:
    pytest.importorskip("anywidget")
    by_play = {fault.play: fault for fault in (*FAULTS, *RESIZES) if fault.play in VIEWED}
    outcomes = play(21, "shm", list(by_play.values()), len(by_play), views=True)
    assert {outcome.fault for outcome in outcomes} == {fault.name for fault in by_play.values()}


@pytest.mark.timeout(300)
def test_a_campaign_with_tensors_of_torch() -> None:
    """The campaign on GPUs, as far as it goes without one: with tensors on the CPU."""
    quick = [fault for fault in ON_DEVICES if fault.play in ("failing", "dying", "interrupting_any")]
    play(13, "shm", quick, len(quick), device="cpu")


@pytest.mark.timeout(300)
def test_a_rank_that_keeps_a_context_of_gloo_is_seen_as_a_leak() -> None:
    """The count must see a leak of the size of one context, also right after trials that end the generation."""
    wrapped = [fault for fault in WRAPPED if fault.deed == "raise"]
    with Campaign(12, "gloo", faults=wrapped) as campaign:
        for number in range(3):
            assert campaign.trial(number).ok
        campaign.values("import os; kept = [os.pipe() for _ in range(2)]", [1])
        leaks, _ = campaign.leaks()
        assert len(leaks) == 1
        assert "hvd-rank-1" in leaks[0]
        assert "4 x pipe" in leaks[0]


@pytest.mark.timeout(300)
def test_ranks_that_are_all_replaced_one_by_one_need_not_have_the_wrapped_model() -> None:
    wrapped = [fault for fault in WRAPPED if fault.deed == "raise"]
    with Campaign(12, "gloo", faults=wrapped, size=2) as campaign:
        assert campaign.trial(0).ok
        for rank in campaign.pool.ranks:
            campaign.pool.restart([rank])
            campaign.set_up([rank])
        assert campaign.train_on() == []


@pytest.mark.timeout(300)
def test_the_story_of_a_hang_shows_where_each_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)  # as without py-spy
    raises = [fault for fault in FAULTS if fault.name == "a rank raises"]
    with Campaign(12, "shm", faults=raises, size=2) as campaign:
        assert campaign.trial(0).ok
        campaign.pool.start_run("import time\ntime.sleep(600)", out=Sink(), ranks=[1])

        def is_missing() -> bool:
            shown = "\n".join(campaign.stacks())
            return "rank 1" not in shown or "time.sleep(600)" not in shown

        assert census.settled(is_missing, PATIENCE), campaign.stacks()
        campaign.discard()

        monkeypatch.setattr(Mailbox, "wait", raising(Hang("a rank does not come")))
        outcome = campaign.trial(1)
        assert outcome.hang == "a rank does not come"
        assert any("rank" in line for line in outcome.events[1:]), outcome.events


def test_an_error_in_place_of_stacks_is_told_in_the_story(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As py-spy's, which stands in the story, and as one of the pool's, which has perhaps broken down."""
    with Campaign(12, "shm", size=2) as campaign:
        refusing = tmp_path / "py-spy"
        refusing.write_text("#!/bin/sh\necho may not trace $4 >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        pids = PoolProbe(campaign.pool).group.pids()
        assert campaign.stacks() == [
            line for rank in (0, 1) for line in (f"rank {rank}:", f"may not trace {pids[rank]}")
        ]
        refusing.unlink()
        monkeypatch.setattr("shutil.which", lambda *_, **__: None)
        monkeypatch.setattr(type(campaign.pool), "where", raising(StartError("the pool has broken down")))
        assert campaign.stacks() == ["no stacks: StartError: the pool has broken down"]


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


def test_a_trial_is_the_same_again() -> None:
    draws = [Campaign(5, "shm").draw(7) for _ in range(2)]
    assert draws[0][0] is draws[1][0]
    assert draws[0][1].random() == draws[1][1].random()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("plane", "seed"), [("shm", 101), ("gloo", 102)])
def test_a_thousand_faults(plane: str, seed: int) -> None:
    play(seed, plane, [*ALL, *RESIZES], 500, views=True)

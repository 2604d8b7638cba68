"""A short campaign of faults on ranks that share a GPU; the long one is ``benchmarks/chaos.py --gpu``."""

from __future__ import annotations

import os

import pytest

from chaos.campaign import Campaign
from chaos.faults import GPU, ON_DEVICES

SLOW = ("pausing", "interrupting")


@pytest.mark.timeout(300)
def test_nothing_hangs_and_nothing_is_lost_on_a_gpu() -> None:
    faults = [fault for fault in (*ON_DEVICES, *GPU) if fault.play not in SLOW]
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    with Campaign(31, "shm", faults=faults, device="cuda:0", alone=alone) as campaign:
        outcomes = list(campaign.play(len(faults)))
        left = campaign.stop()
    stories = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not stories, "\n\n".join(stories)
    assert left == []
    assert all(outcome.report is not None for outcome in outcomes)

"""A rank's secret leaves its environment, which its children, crash reporters and `env` in a cell show, and init() goes on to work."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.settings import Settings
from support.ranks.resident import Ranks, resident_ranks

two = resident_ranks(2)


def what_a_child_sees() -> str:
    context.init()
    return subprocess.run(["env"], capture_output=True, text=True, check=True).stdout


def again() -> float:
    context.shutdown()
    context.init()
    return float(hvd.allreduce(np.ones(2), op=hvd.Sum)[0])


def start_a_rank() -> str:
    script = "from hvdlab.collectives import context\ncontext.init()"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr


def test_no_child_of_a_rank_has_its_secret_and_the_rank_can_come_back(two: Ranks) -> None:
    for seen in two.run(what_a_child_sees):
        assert "HVDLAB_COORDINATOR=" in seen
        assert two.coordinator.token not in seen
        assert two.coordinator.client_token not in seen
    assert two.run(again) == [2.0, 2.0]


def test_a_process_that_a_rank_starts_learns_why_it_is_none(two: Ranks) -> None:
    two.run(what_a_child_sees)
    for error in two.run(start_a_rank, timeout=60):
        assert "StartError" in error
        assert "no secret in HVDLAB_TOKEN" in error


def test_another_coordinator_is_not_shown_the_secret_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context._context, "secret", (None, ""))
    monkeypatch.setenv("HVDLAB_COORDINATOR", "unix:/one")
    monkeypatch.setenv("HVDLAB_TOKEN", "first")
    assert context.take_settings().token == "first"
    assert "HVDLAB_TOKEN" not in os.environ
    assert context.take_settings().token == "first"
    monkeypatch.setenv("HVDLAB_COORDINATOR", "unix:/two")
    assert context.take_settings().token == ""
    with pytest.raises(StartError, match="no secret"):
        context.init()


def test_a_token_of_ranks_admits_no_client() -> None:
    from hvdlab.collectives.client import Client

    with (
        CoordinatorProcess.start(size=1) as coordinator,
        pytest.raises(StartError, match="its token is that of a rank"),
    ):
        Client.connect(coordinator.address, coordinator.token)


def test_settings_that_are_only_looked_at_leave_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVDLAB_TOKEN", "shown")
    assert Settings.from_env().token == "shown"
    assert os.environ["HVDLAB_TOKEN"] == "shown"

"""HOROVOD_TIMELINE with the torch binding, from the environment variable to the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import hvdlab.torch as hvd
from hvdlab.runner.check_trace import load
from support.patience import PATIENCE
from support.ranks.resident import Ranks


def train(steps: int) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters()
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    hvd.shutdown()


def test_the_variable_makes_a_sound_trace_of_a_training(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Ranks(2, init=False, env={"HOROVOD_TIMELINE": str(path)}, imports=["torch"]) as ranks:
        ranks.run(train, 5, timeout=60)
    checked = subprocess.run(
        [sys.executable, "-m", "hvdlab.runner.check_trace", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    events = load(path.read_text())
    assert {event["pid"] for event in events if event["name"] == "ALLREDUCE"} == {0, 1}
    assert {event["pid"] for event in events if event["name"] == "BROADCAST"} == {0, 1}

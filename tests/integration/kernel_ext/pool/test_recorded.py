"""A training that goes wrong on one rank, from the error to the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError

from hvdlab.kernel_ext.notebook.output.error_report import report
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.magics import variable_magics

StartPool = Callable[..., Pool]

SETUP = """
import torch, hvdlab.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
recorded = hvd.record(model, optimizer, last=10, loss=(criterion := torch.nn.MSELoss()))
"""
TRAIN = """
for step in range(1, 20):
    batch = torch.full((3, 4), float(step))
    if step == 7 and hvd.rank() == 1:
        batch[0, 3] = torch.nan
    optimizer.zero_grad()
    loss = criterion(model(batch), torch.ones(3, 2))
    loss.backward()
    optimizer.step()
    if not torch.isfinite(model.weight).all():
        raise ValueError('the model is no more')
"""


@pytest.fixture(autouse=True)
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks need it, and the first optimizer's imports: once is enough."""
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch,torch._dynamo")


@pytest.fixture
def pool(start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pool:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pool = start_pool(2, timeout=100)
    assert pool.run(SETUP, timeout=100).ok
    return pool


def test_the_batch_that_made_the_nan_is_shown_and_brought(pool: Pool) -> None:
    text = re.sub(r"\x1b\[\d+m", "", "\n".join(report(pool.run(TRAIN))))
    assert "ValueError: the model is no more" in text
    assert "The last steps of rank 0:\n  step 5  loss " in text
    assert "rank 1: step 7  loss nan  gradient norm nan  [0] float32[3, 4] #" in text
    assert "`%hvd_replay` brings such a batch" in text

    suspects = pool.pull(f"{variable_magics._RECORD}.suspects()")
    assert variable_magics._first_wrong(suspects) == 1
    found: Any = pool.pull(f"{variable_magics._RECORD}.replay(None)", [1])[1]
    assert (found.rank, found.step) == (1, 7)
    assert torch.isnan(found.args[0]).nonzero().tolist() == [[0, 3]]
    with pytest.raises(LookupError, match="step 99 is not kept; steps 1 to 7 are"):
        pool.pull(f"{variable_magics._RECORD}.replay(99)")


def test_nothing_recorded_is_said() -> None:
    with pytest.raises(UsageError, match="nothing was recorded"):
        variable_magics._first_wrong({0: None, 1: None})
    late, near = (9, 0, "late"), (3, 2, "the sum over all ranks")
    assert variable_magics._first_wrong({0: late, 1: near, 2: (3, 0, "the batch"), 3: None}) == 2

"""Which kernels a rank waits for, as ``%hvd_where`` names them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from hvdlab.kernel_ext.pool import Pool
from hvdlab.kernel_ext.rank.gpu_calls import SWITCH
from patience import PATIENCE

LONG = """
import torch
x = torch.ones(10, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(6_000_000_000)  # cycles: some seconds
y = x + 1
torch.cuda.synchronize()
"""


@pytest.fixture
def pool(real_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    monkeypatch.setenv(SWITCH, "1")
    with Pool.start(2) as pool:
        yield pool


def test_where_names_the_kernels_that_a_rank_waits_for(pool: Pool) -> None:
    run = pool.start_run(LONG, ranks=[1])
    deadline = time.monotonic() + PATIENCE
    text, seen = "", set[str]()
    while "waits for its GPU" not in text and not run.done and time.monotonic() < deadline:
        text = repr(pool.where([1]))  # each asks the rank, which takes a moment
        seen.add(text)
    assert "torch.cuda.synchronize()" in text, (seen, run.results)
    assert "(cuCtxSynchronize): kernels `" in text
    assert "spin_kernel" in text
    assert "vectorized_elementwise_kernel" in text
    assert run.wait(PATIENCE).ok
    # What it has waited for is done: nothing of it is named again.
    assert "spin_kernel" not in repr(pool.where())

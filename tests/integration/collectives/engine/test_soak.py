"""Ten thousand steps leave nothing behind."""

from __future__ import annotations

import gc
import os

import numpy as np
import psutil
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from support.ranks.resident import Ranks, resident_ranks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

STEPS = 10_000
GROWTH_BYTES = 8 << 20  # of resident memory over STEPS steps


two = resident_ranks(2, scope="function")


def steps(count: int) -> tuple[int, int]:
    """Run named, anonymous, small, large and ragged operations; return resident bytes and open descriptors."""
    rng = np.random.default_rng(0)
    rank = context.engine().rank
    for step in range(count):
        handles = [
            hvd.allreduce_async(np.ones(int(n), np.float32), f"grad.{i}", op=hvd.Sum)
            for i, n in enumerate(rng.integers(1, 20_000, 8))
        ]
        hvd.allgather(np.ones((rank + step % 3, 2)))
        for handle in handles:
            assert np.asarray(hvd.synchronize(handle))[0] == 2
        if step % 100 == 0:
            hvd.barrier()
    gc.collect()
    process = psutil.Process(os.getpid())
    return process.memory_info().rss, process.num_fds()


def test_memory_and_descriptors_stay_flat(two: Ranks) -> None:
    warm = two.run(steps, 500)
    after = two.start(steps, STEPS).outcomes(timeout=1500)
    for (rss, fds), (rss_after, fds_after) in zip(warm, after, strict=True):
        assert fds_after == fds
        assert rss_after - rss < GROWTH_BYTES, f"{(rss_after - rss) / STEPS:.0f} bytes per step"

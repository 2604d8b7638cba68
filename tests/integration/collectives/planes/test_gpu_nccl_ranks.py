"""Ranks with arrays on a GPU whose plane is `cuda/nccl`, on a simulated GPU with a simulated NCCL: deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.system import HOST_VARIABLE
from support.fakes import nccl as fake_nccl
from support.patience import PATIENCE
from support.ranks.resident import RankGone, Ranks

COUNT = 50_000


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(3, init=False, env={fake_nccl.DIRECTORY: str(tmp_path)}) as ranks:
        yield ranks


# -- on the ranks -----------------------------------------------------------------------------------------------------


def arrays() -> Any:
    from support.fakes import gpu_arrays as fake_gpu_arrays

    return fake_gpu_arrays


def join(hosts: str, choice: str) -> str:
    """Join as a rank with a GPU of its own and NCCL; returns the plane for CUDA tensors."""
    arrays().GPU.identity = os.environ["HVDLAB_RANK"] * 32
    os.environ[HOST_VARIABLE] = hosts[int(os.environ["HVDLAB_RANK"])]
    os.environ[gpu_plane.CHOICE] = choice
    fake_nccl.install(arrays().GPU)
    context.init()
    return context.engine().device_plane(0, "cuda")


def total() -> float:
    hvd = arrays()
    return float(hvd.allreduce(hvd.on_gpu(np.ones(COUNT)), op=hvd.Sum).get()[-1])


def total_in_which(rank: int, number: int) -> float:
    """Reduce while a rank gets a signal when NCCL is about to send its part."""
    if context.engine().rank == rank:
        fake_nccl.FakeCommunicator._send = (  # type: ignore[method-assign]
            lambda self, member, content: signal.raise_signal(number)
        )
    return total()


# -- tests ------------------------------------------------------------------------------------------------------------


def test_survivors_of_a_rank_that_dies_in_the_middle_of_an_operation_go_on(three: Ranks) -> None:
    three.run(join, "aab", "auto")
    three.run(total)
    running = three.start(total_in_which, 0, signal.SIGKILL)
    kinds = [type(outcome) for outcome in running.outcomes(PATIENCE)]
    assert kinds == [RankGone, AbortedError, AbortedError]
    assert three.run(total, ranks=[1, 2]) == [2.0, 2.0]

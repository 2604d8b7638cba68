"""Way of CUDA tensors through the host, in one process, on a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdlab.collectives.planes.base import PlaneContext
from hvdlab.collectives.planes.gpu.staged_plane import StagedPlane
from support.fakes.cuda import FakeCuda
from support.patience import PATIENCE
from support.ranks.gpu_members import Store, assert_an_interrupt_leaves_tensors_to_the_gpu, simulated_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Yield a GPU that this process seems to have."""
    with simulated_gpu(monkeypatch) as found:
        yield found


def test_tensors_of_an_interrupted_copy_stay_until_it_is_done(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = StagedPlane(PlaneContext(0, 0, 0, 1, (0,), ("here",), Store()), gpu, 0)
    plane.connect(PATIENCE)
    assert_an_interrupt_leaves_tensors_to_the_gpu(plane, gpu, monkeypatch, (gpu, "synchronize"))

"""Sampling of a GPU that is there. Skipped where none is, or ``nvidia-ml-py`` or a torch with CUDA is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdlab.bindings.framework_hooks import devices_in_use
from hvdlab.collectives.metrics.sampler import GpuUsage, ask_frameworks

torch = pytest.importorskip("torch")

GB = 1 << 30


@pytest.fixture
def gpus() -> Iterator[GpuUsage]:
    pytest.importorskip("pynvml")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    ask_frameworks(devices_in_use)
    found = GpuUsage.find()
    assert found is not None
    yield found
    found.close()


def test_memory_that_torch_takes_is_seen_under_torchs_number(gpus: GpuUsage) -> None:
    device = torch.cuda.current_device()
    small = torch.ones(1, device="cuda")
    before = dict(gpus.sample())[f"hvdlab/gpu{device}/memory"]
    block = torch.ones(GB // 4, device="cuda")
    torch.cuda.synchronize()
    after = dict(gpus.sample())[f"hvdlab/gpu{device}/memory"]
    assert after - before == pytest.approx(GB, rel=0.1)
    del small, block
    torch.cuda.empty_cache()


def test_a_gpu_that_works_is_utilised(gpus: GpuUsage) -> None:
    device = torch.cuda.current_device()
    matrix = torch.randn(4096, 4096, device="cuda")
    seen = 0.0
    for _ in range(50):  # the driver averages over up to a second
        for _ in range(20):
            matrix = matrix @ matrix
            matrix /= matrix.norm()
        torch.cuda.synchronize()
        seen = max(seen, dict(gpus.sample())[f"hvdlab/gpu{device}/utilisation"])
    assert 10 < seen <= 100

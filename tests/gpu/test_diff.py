"""Fingerprints and counts of CUDA tensors, made on a real GPU: the same numbers as on the host, and little memory."""

from __future__ import annotations

import pytest
import torch

from hvdlab.bindings import fingerprints
from hvdlab.bindings.framework_hooks import torch as hooks
from hvdlab.kernel_ext.rank.compare import ComparedValue
from support.ranks.resident import Ranks

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "complex64", "float8_e4m3fn"]


@pytest.fixture(scope="module", autouse=True)
def torch_with_cuda(real_gpu: None) -> None:
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")


# -- on the rank: a process that has used a GPU can't fork others -------------------------------------------------------


def both(name: str) -> tuple[bool, bool, bool]:
    """Whether the GPU makes the fingerprints and finds the counts that the host does by the same method, and whether one changed bit is found."""
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (3 * fingerprints.BLOCK + 64 * size,), dtype=torch.uint8)
    here = raw.view(dtype)[1:]  # an odd place, for types of less than 4 bytes
    there = here.cuda()
    ours = hooks.TensorOnDevice(here.view(torch.uint8), here)
    theirs = hooks.TensorOnDevice(there.view(torch.uint8), there)
    before = theirs.fingerprints()
    counts = theirs.not_finite(), ours.not_finite()
    changed = there.view(torch.uint8)
    changed[fingerprints.BLOCK + 5] ^= 0x80
    return (
        before == ours.fingerprints(),
        counts[0] == counts[1],
        fingerprints.differing(before, theirs.fingerprints()) == [1],
    )


def agree() -> tuple[bool, bool, int]:
    """Whether equal tensors agree without being read, and how much memory that took."""
    first = torch.randn(20_000_000, device="cuda")
    second = first.clone()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    one, other = ComparedValue({"w": first}), ComparedValue({"w": second})
    peak = torch.cuda.max_memory_allocated() - held
    used = all(leaf.on_device for leaf in one.leaves if leaf.kind == "array")
    return one.examined(1).digest == other.examined(1).digest, used, peak


@pytest.mark.parametrize("name", DTYPES)
def test_a_gpu_makes_the_numbers_that_the_host_would_make(name: str) -> None:
    with Ranks(1, init=False, imports=["torch"]) as ranks:
        assert ranks.run(both, name, timeout=60) == [(True, True, True)]


def test_equal_tensors_agree_and_it_takes_little_memory() -> None:
    with Ranks(1, init=False, imports=["torch"]) as ranks:
        ((same, used, peak),) = ranks.run(agree, timeout=60)
    assert same
    assert used
    assert peak < 40 << 20

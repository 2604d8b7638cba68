"""CUDA tensors in torch's binding, on a simulated GPU: tensors in its memory stand for CUDA tensors, which need a real GPU.

``tests/gpu`` tests torch's own part, its streams and allocator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.types import DType
from hvdlab.torch.adapter import BINDING, CudaTensors, TorchAdapter
from support.engine_probe import EngineProbe
from support.fakes import cuda as fake_cuda
from support.ranks.resident import Ranks

DEFAULT_STREAM = SimpleNamespace(cuda_stream=0)


class Simulated(CudaTensors):
    """Device memory that treats tensors in the simulated GPU's memory, which are host tensors for torch, as CUDA
    tensors."""

    def __init__(self, gpu: fake_cuda.FakeCuda) -> None:
        self.gpu = gpu
        self.received_here: list[int] = []

    def device(self, tensor: torch.Tensor) -> str:
        return gpu_plane.CUDA if self.gpu.allocation_of(tensor.data_ptr()) is not None else "cpu"

    def view(self, tensor: torch.Tensor) -> Any:
        return super().view(Located(tensor))  # type: ignore[arg-type]  # it reads no more

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return on_gpu(self.gpu, torch.zeros(shape, dtype=like.dtype))

    def received(self, output: torch.Tensor) -> torch.Tensor:
        self.received_here.append(output.data_ptr())
        return output


class Located:
    """Tensor that claims to be on the first GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.data_ptr, self.shape, self.dtype = tensor.data_ptr, tensor.shape, tensor.dtype


class NothingOnTheHost(TorchAdapter):
    """Declares no tensor direct, so that the binding asks :class:`Simulated` about all of them."""

    def is_direct(self, tensor: torch.Tensor) -> bool:
        return False

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a tensor was to be staged through the host")


def on_gpu(gpu: fake_cuda.FakeCuda, tensor: torch.Tensor) -> torch.Tensor:
    nbytes = max(1, tensor.numel() * tensor.element_size())
    memory = (ctypes.c_uint8 * nbytes).from_address(gpu.allocate(nbytes))
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


# -- on the ranks -----------------------------------------------------------------------------------------------------


def begin() -> None:
    from hvdlab import torch as hvd

    global gpu
    gpu = fake_cuda.install()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda device=None: DEFAULT_STREAM  # type: ignore[assignment,return-value]
    BINDING.__init__(NothingOnTheHost(), Simulated(gpu))  # type: ignore[misc]  # all public functions use it
    hvd.init()


def reduced() -> list[Any]:
    from hvdlab import torch as hvd

    mine = on_gpu(gpu, torch.arange(6.0).view(2, 3) + hvd.rank())
    summed = hvd.allreduce(mine, op=hvd.Sum)
    in_place = hvd.allreduce_(mine, op=hvd.Average)
    same = in_place is mine
    transposed = hvd.allreduce(mine.t(), op=hvd.Sum)
    half = hvd.allreduce(on_gpu(gpu, torch.full((5,), 1.5, dtype=torch.bfloat16)), op=hvd.Sum)
    return [summed.tolist(), same, mine.tolist(), transposed.tolist(), half.tolist()]


def moved() -> list[Any]:
    from hvdlab import torch as hvd

    mine = on_gpu(gpu, torch.full((hvd.rank() + 1, 2), float(hvd.rank())))
    gathered = hvd.allgather(mine)
    sent = hvd.broadcast(on_gpu(gpu, torch.tensor([float(hvd.rank() + 3)])), root_rank=1)
    devices: Any = BINDING._devices
    return [gathered.tolist(), sent.tolist(), gathered.data_ptr() in devices.received_here]


def linked() -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the engine's links, and its records for the tables of ranks."""
    from hvdlab.collectives import context

    engine = context.engine()
    return dict(engine.links()), EngineProbe(engine).spans._members[0][2]


def capture() -> str:
    from hvdlab import torch as hvd

    mine = on_gpu(gpu, torch.ones(3))
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        hvd.allreduce(mine)
    except InvalidRequestError as error:
        return str(error)
    finally:
        torch.cuda.is_current_stream_capturing = lambda: False
    return ""


def trained() -> tuple[list[Any], bool]:
    from hvdlab import torch as hvd

    weight = torch.nn.Parameter(on_gpu(gpu, torch.ones(4)))
    weight.grad = on_gpu(gpu, torch.zeros(4))
    where = weight.grad.data_ptr()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 0.5), named_parameters=[("weight", weight)]
    )
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        (weight * float(hvd.rank() + 1)).sum().backward()
        optimizer.step()
    return weight.tolist(), weight.grad.data_ptr() == where


gpu: fake_cuda.FakeCuda


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, init=False, imports=["torch", "hvdlab.torch"]) as ranks:
        ranks.run(begin, timeout=60)
        yield ranks


def test_reductions_work_on_the_memory_of_the_gpu(two: Ranks) -> None:
    values = torch.arange(6.0).view(2, 3)
    average = values + 0.5
    expected = [
        (2 * values + 1).tolist(), True, average.tolist(), (2 * average).t().tolist(), [3.0] * 5
    ]  # fmt: skip
    assert two.run(reduced) == [expected] * 2


def test_what_other_threads_allocate_is_made_known_to_the_users_stream(two: Ranks) -> None:
    assert two.run(moved) == [[[[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]], [4.0], True]] * 2


def test_what_tensors_go_over_is_known_once_the_ranks_have_met_on_a_gpu(two: Ranks) -> None:
    two.run(reduced)
    known = [({"same GPU": (1 - rank,)}, "shm, cuda/ipc, checked (same GPU)") for rank in range(2)]
    assert two.run(linked) == known


def test_gradients_are_averaged_where_they_are(two: Ranks) -> None:
    assert two.run(trained) == [([1.0 - 2 * 0.5 * 1.5] * 4, True)] * 2


def test_a_collective_is_not_captured_in_a_graph(two: Ranks) -> None:
    assert all("can't be captured in a CUDA graph" in text for text in two.run(capture))


def test_a_buffer_has_what_the_plane_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_here = fake_cuda.FakeGpus()
    monkeypatch.setattr(gpu_plane, "gpus", lambda: gpu_here)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: DEFAULT_STREAM)
    tensor = torch.ones(2, 3, dtype=torch.float16)
    buffer = CudaTensors().view(Located(tensor))  # type: ignore[arg-type]
    assert (buffer.pointer, buffer.shape, buffer.dtype) == (tensor.data_ptr(), (2, 3), DType.F16)
    assert (buffer.nbytes, buffer.device) == (12, "cuda")
    assert isinstance(buffer, gpu_plane.CudaBuffer)
    assert buffer.after is not None
    assert list(gpu_here.device._events) == [buffer.after.event]
    del buffer
    assert not gpu_here.device._events, "events are given back"

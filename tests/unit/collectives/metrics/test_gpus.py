"""Which GPUs are sampled, with a library and a torch that are made up. Real ones: :mod:`test_real_gpu`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.bindings.framework_hooks import devices_in_use
from hvdlab.collectives.metrics import sampler
from hvdlab.collectives.metrics.sampler import GpuUsage

GB = float(1 << 30)


class NvmlError(Exception):
    pass


class Nvml:
    """Used part of ``pynvml``, with GPUs whose utilisation is 10 times their number. Handles are numbers."""

    NVMLError = NvmlError

    def __init__(self, uuids: list[str], no_utilisation: bool = False, driver: bool = True) -> None:
        self.uuids, self.no_utilisation, self.driver = uuids, no_utilisation, driver
        self.sessions = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NvmlError("Driver Not Loaded")
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.uuids[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid == "MIG-77":
            return 77
        raise NvmlError("Not Found")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.no_utilisation or handle == 77:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=10 * handle, memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=int((handle + 1) * GB), total=int(80 * GB))


FOUR = ["GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd"]


def torch_with(uuids: list[str], used: set[int], initialized: bool = True) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: initialized,
            device_count=lambda: len(uuids),
            memory_reserved=lambda index: 4096 if index in used else 0,
            get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
        )
    )


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sampler, "_in_use", devices_in_use)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_only_gpu_is_sampled() -> None:
    values = GpuUsage(Nvml(["GPU-aaaa"])).sample()
    assert values == [("hvdlab/gpu0/utilisation", 0.0), ("hvdlab/gpu0/memory", GB)]


def test_of_several_none_is_as_long_as_it_is_not_known_which_is_used() -> None:
    assert GpuUsage(Nvml(FOUR)).sample() == []


@pytest.mark.parametrize("text", ["2", "GPU-cccc", "GPU-cc", " 2 "])
def test_the_only_visible_one_is_number_0(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    values = GpuUsage(Nvml(FOUR)).sample()
    assert values == [("hvdlab/gpu0/utilisation", 20.0), ("hvdlab/gpu0/memory", 3 * GB)]


@pytest.mark.parametrize("text", ["", "-1", "0,1", "7", "GPU-zzzz", "NoDevFiles", "-1,2"])
def test_none_or_several_visible_ones_are_not_sampled(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert GpuUsage(Nvml(FOUR)).sample() == []


def test_an_instance_of_a_shared_gpu_tells_its_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77")
    assert GpuUsage(Nvml(FOUR)).sample() == [("hvdlab/gpu0/memory", 78 * GB)]


def test_those_that_torch_uses_are_sampled_under_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch counts them in another order than the library.
    monkeypatch.setitem(sys.modules, "torch", torch_with(["dddd", "cccc", "bbbb"], {0, 2}))
    assert dict(GpuUsage(Nvml(FOUR)).sample()) == {
        "hvdlab/gpu0/utilisation": 30.0,
        "hvdlab/gpu0/memory": 4 * GB,
        "hvdlab/gpu2/utilisation": 10.0,
        "hvdlab/gpu2/memory": 2 * GB,
    }


def test_a_torch_that_has_not_begun_does_not_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(["aaaa"], set(), initialized=False))
    assert len(GpuUsage(Nvml(["GPU-aaaa"])).sample()) == 2
    assert GpuUsage(Nvml(FOUR)).sample() == []


def test_a_torch_that_is_being_imported_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace()))
    assert GpuUsage(Nvml(FOUR)).sample() == []


def test_a_device_that_has_failed_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    torch = torch_with(["aaaa"], {0})
    torch.cuda.memory_reserved = fail
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert GpuUsage(Nvml(FOUR)).sample() == []


def test_the_library_is_looked_for_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(FOUR)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    usage = GpuUsage.find()
    assert usage is not None
    assert nvml.sessions == 1
    usage.close()
    assert nvml.sessions == 0


def test_without_driver_or_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(FOUR, driver=False))
    assert GpuUsage.find() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuUsage.find() is None

"""``kernels.cu`` by NVIDIA's compiler, which needs no GPU; and on a GPU against the host's folds, halves and NaNs included."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.device import KernelLaunch
from hvdlab.collectives.planes.gpu.jobs import table_of
from hvdlab.collectives.reduce import make_fold
from hvdlab.collectives.types import PLAIN, DType, ReduceOp
from support.real_gpu import why_no_gpu

COUNT = 40_003


@pytest.fixture(scope="session", autouse=True)
def real_gpu() -> None:
    """In place of that of all of ``tests/gpu``: the compiler can be tried without a GPU."""


@pytest.fixture(scope="session", autouse=True)
def kernels() -> Any:
    """Return the compiler, and the GPU if there is one. The driver keeps descriptors for the life of the process, which
    are no leak."""
    pytest.importorskip("cuda.bindings", reason="NVIDIA's bindings are not installed")
    from hvdlab.collectives.planes.gpu import driver as kernels

    kernels.compiled_kernel(None, ReduceOp.SUM, 90)
    if not why_no_gpu():
        gpu = gpu_plane.gpus().open(0)
        with gpu:
            gpu.end_stream(gpu.new_stream())
    return kernels


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [None, DType.U8, DType.I64, DType.F16, DType.BF16, DType.F64])
def test_nvidias_compiler_takes_the_source(kernels: Any, dtype: DType | None, op: ReduceOp) -> None:
    assert kernels.compiled_kernel(dtype, op, 90).startswith(b"\x7fELF")


def test_a_gpu_that_is_newer_than_the_compiler_gets_what_its_driver_translates(kernels: Any) -> None:
    assert b".entry copy" in kernels.compiled_kernel(None, ReduceOp.SUM, 999)
    assert kernels.architecture(999, [75, 90]) == "compute_90"
    with pytest.raises(Exception, match="as old as"):
        kernels.architecture(50, [75, 90])


@pytest.mark.parametrize(
    "op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name
)
@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DType if dtype is not DType.BOOL], ids=lambda dtype: dtype.label
)
def test_a_gpu_gives_the_bits_of_the_host(kernels: Any, dtype: DType, op: ReduceOp) -> None:
    from cuda.bindings import driver

    if reason := why_no_gpu():
        pytest.skip(reason)
    gpu, rng, kind = gpu_plane.gpus().open(0), np.random.default_rng(3), storage_type(dtype)
    inputs = [rng.integers(0, 3, COUNT).astype(kind) for _ in range(3)]
    if dtype.is_floating and dtype is not DType.BF16:
        inputs[1][7] = np.nan
    expected = np.empty(COUNT, kind)
    make_fold(dtype, op)(inputs, expected, 1.0, 1.0)
    host = np.zeros(1 << 16, np.uint8)
    result = np.empty(COUNT, kind)
    with gpu:
        stream, mapped = gpu.new_stream(), gpu.register(host.ctypes.data, host.nbytes)
        places = [gpu.allocate(COUNT * kind.itemsize) for _ in range(4)]
        for place, array in zip(places[:3], inputs, strict=True):
            assert driver.cuMemcpyHtoD(place, array.ctypes.data, array.nbytes)[0] == 0
        table = table_of(np.array([COUNT]), np.array([places], np.uint64), kind.itemsize)
        host[: table.words.nbytes] = table.words.view(np.uint8)
        times, stopped = mapped + (1 << 15), mapped + (1 << 14)
        gpu.launch(
            KernelLaunch(dtype, PLAIN[op], 1, 3, 1, table.chunk, table.chunks, mapped, stopped, 1, 1, times),
            stream,
        )
        event = gpu.new_event()
        gpu.record(event, stream)
        gpu.synchronize(event)
        assert driver.cuMemcpyDtoH(result.ctypes.data, places[3], result.nbytes)[0] == 0
        for place in places:
            gpu.free(place)
        gpu.unregister(host.ctypes.data)
        gpu.end_event(event)
        gpu.end_stream(stream)
    began, ended = (ctypes.c_uint64 * 2).from_buffer(host.data, 1 << 15)
    assert 0 < began <= ended
    if (
        dtype.is_floating and dtype is not DType.BF16
    ):  # which of the many NaNs an addition gives is the processor's choice
        assert (np.isnan(result) == np.isnan(expected)).all()
        result[np.isnan(result)] = expected[np.isnan(expected)] = 0
    np.testing.assert_array_equal(result.view(np.uint8), expected.view(np.uint8))

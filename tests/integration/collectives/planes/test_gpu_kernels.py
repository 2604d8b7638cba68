"""``kernels.cu`` against the host's folds: compiled for the host, with one thread for each block, as a GPU would run it.

Behaviour that only GPUs have (threads side by side, its own conversion of halves) is for ``tests/gpu``.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.planes.gpu.jobs import chunk_bytes, share, table_of
from hvdlab.collectives.reduce import make_fold
from hvdlab.collectives.types import DType, ReduceOp

SOURCE = Path(__file__).parents[4] / "collectives" / "planes" / "gpu" / "kernels.cu"
COMPILER = shutil.which("g++")
ELEMENTS = {
    DType.U8: "Integer<u8>",
    DType.I64: "Integer<long long>",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F32: "F32",
}
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

#: CUDA's own definitions that C++ lacks; then one kernel for each type and operator, called block by block.
HOST = """
#define __device__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
#define __syncthreads()
#include <cstring>
struct Index { unsigned x; };
static Index threadIdx = {0}, blockDim = {1}, blockIdx, gridDim;
template <typename To, typename From> static To bits_of(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_of<float>(x); }
static float host_widen(unsigned short x) { return (float)bits_of<_Float16>(x); }
static unsigned short host_narrow(float x) { return bits_of<unsigned short>((_Float16)x); }
static unsigned long long host_time() { static unsigned long long time = 0; return ++time; }
"""
RUN = """
extern "C" void run_KERNEL(int blocks, const u64* table, u32 jobs, u32 ins, u32 outs, double before, double after, u64 elements,
                           const u32* stopped, u32 members, u32 stride, u64* times) {
    gridDim.x = blocks;
    for (int block = 0; block < blocks; block++) {
        blockIdx.x = block;
        KERNEL(table, jobs, ins, outs, before, after, elements, stopped, members, stride, times);
    }
}
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load the kernel of a type and operator."""
    if COMPILER is None:
        pytest.skip("there is no g++ to compile the kernels for the host")
    place = tmp_path_factory.mktemp("kernels")
    built: dict[str, ctypes.CDLL] = {}

    def load(dtype: DType | None, op: ReduceOp) -> Any:
        name = "copy" if dtype is None else f"{dtype.label}-{op.name}"
        if name not in built:
            kernel = "copy" if dtype is None else "fold"
            (place / "kernel.cpp").write_text(HOST + SOURCE.read_text() + RUN.replace("KERNEL", kernel))
            macros = [] if dtype is None else [f"-DELEMENT={ELEMENTS[dtype]}", f"-DOP={op.name}"]
            command = [str(COMPILER), "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
            target = place / f"{name}.so"
            subprocess.run([*command, *macros, "-o", str(target), str(place / "kernel.cpp")], check=True)
            built[name] = ctypes.CDLL(str(target))
        return built[name]["run_copy" if dtype is None else "run_fold"]

    return load


def run(
    kernel: Any, table: Any, ins: int, outs: int, before: float, after: float, stopped: bool = False
) -> list[int]:
    """Launch it over three blocks; return the times that it leaves."""
    flags, times = (ctypes.c_uint32 * 4)(0, 0, int(stopped), 0), (ctypes.c_uint64 * 2)()
    numbers = (ctypes.c_uint32(number) for number in (table.jobs, ins, outs))
    kernel(
        3, ctypes.c_void_p(table.words.ctypes.data), *numbers, ctypes.c_double(before), ctypes.c_double(after),
        ctypes.c_uint64(table.chunk), flags, ctypes.c_uint32(2), ctypes.c_uint32(2), times,
    )  # fmt: skip
    return list(times)


def placed(count: int, kind: np.dtype[Any], shift: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Return random numbers that begin ``shift`` bytes behind a multiple of 16."""
    memory = np.zeros(count * kind.itemsize + 64, np.uint8)
    begin = -memory.ctypes.data % 16 + shift
    array = memory[begin : begin + count * kind.itemsize].view(kind)
    numbers = rng.integers(0, 5, count)
    if kind == np.uint16:  # bfloat16: the upper half of a float32
        array[:] = (numbers.astype(np.float32) * 1.1).view(np.uint32) >> 16
    else:
        array[:] = numbers if kind.kind in "iu" else numbers * 1.1
    return array


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ELEMENTS, ids=lambda dtype: dtype.label)
def test_a_reduction_gives_the_bits_of_the_host(build: Any, dtype: DType, op: ReduceOp) -> None:
    rng, kind = np.random.default_rng(5), storage_type(dtype)
    kernel = build(dtype, op)
    before, after = (
        (0.5, 3.0) if op is ReduceOp.SUM and dtype.label.startswith(("float", "bfloat")) else (1.0, 1.0)
    )
    counts = np.array([1, 5000, 33])
    inputs = [
        [placed(count, kind, shift, rng) for _ in range(3)]
        for count, shift in zip(counts, (8, 0, 0), strict=True)
    ]
    expected = []
    for arrays in inputs:
        result = np.empty_like(arrays[0])
        make_fold(dtype, op)(arrays, result, before, after)
        expected.append(result)
    outs = [[arrays[0], placed(len(arrays[0]), kind, 0, rng)] for arrays in inputs]  # the first one in place
    addresses = np.array(
        [[a.ctypes.data for a in (*i, *o)] for i, o in zip(inputs, outs, strict=True)], np.uint64
    )
    table = table_of(counts, addresses, kind.itemsize)
    assert table.chunks > 3, "a block has more than one chunk"
    began, ended = run(kernel, table, 3, 2, before, after)
    assert 0 < began < ended
    for result, written in zip(expected, outs, strict=True):
        for out in written:
            np.testing.assert_array_equal(out.view(np.uint8), result.view(np.uint8))


def test_bytes_are_copied_to_all_outputs_and_to_nothing_else(build: Any) -> None:
    rng = np.random.default_rng(6)
    source = rng.integers(0, 255, 10_001).astype(np.uint8)
    targets = [np.zeros(10_050, np.uint8) for _ in range(2)]
    addresses = np.array([[source.ctypes.data, *(t.ctypes.data + 3 for t in targets)]], np.uint64)
    run(build(None, ReduceOp.SUM), table_of(np.array([10_001]), addresses, 1), 1, 2, 1.0, 1.0)
    for target in targets:
        np.testing.assert_array_equal(target[3:10_004], source)
        assert not target[:3].any()
        assert not target[10_004:].any()


def test_nothing_is_written_once_a_member_has_given_up(build: Any) -> None:
    source, target = np.ones(100, np.float32), np.zeros(100, np.float32)
    addresses = np.array([[source.ctypes.data, target.ctypes.data]], np.uint64)
    table = table_of(np.array([100]), addresses, 4)
    run(build(DType.F32, ReduceOp.SUM), table, 1, 1, 1.0, 1.0, stopped=True)
    assert not target.any()
    run(build(DType.F32, ReduceOp.SUM), table, 1, 1, 1.0, 1.0)
    assert target.all()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_shares_cover_each_element_once_and_begin_at_lines(parts: int) -> None:
    counts = np.array([0, 1, 3, 4, 1000, 12345])
    shares = [share(counts, part, parts, 4) for part in range(parts)]
    ends = np.zeros_like(counts)
    for begins, lengths in shares:
        np.testing.assert_array_equal(begins, ends)
        assert not ((begins % 4 != 0) & (lengths > 0)).any()
        ends = begins + lengths
    np.testing.assert_array_equal(ends, counts)


def test_chunks_grow_with_what_there_is_to_do() -> None:
    sizes = [chunk_bytes(1 << shift) for shift in range(10, 34)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (4096, 65536)


def test_the_source_has_a_struct_for_each_name_that_chooses_one() -> None:
    names = (SOURCE.parent / "device.py").read_text()
    for element in re.findall(r'DType\.\w+: "([^"<]+)', names):
        assert f"struct {element}" in SOURCE.read_text()

"""Arrays of GPUs in ``hvdlab.numpy``, as far as the suite of bindings does not have them: DLPack, refusals and
staging."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from support.ranks.resident import Ranks, resident_ranks

two = resident_ranks(2, imports=["support.fakes.gpu_arrays"])


staging = resident_ranks(2, imports=["support.fakes.gpu_arrays"], env={"HVDLAB_CUDA": "0"})


# -- on the ranks -----------------------------------------------------------------------------------------------------


def arrays() -> Any:
    from support.fakes import gpu_arrays as fake_gpu_arrays

    return fake_gpu_arrays


def dlpack() -> tuple[bool, list[float], str]:
    hvd = arrays()
    array = hvd.DlpackArray(hvd.on_gpu(np.arange(4.0) + hvd.rank()))
    same = hvd.allreduce_(array, op=hvd.Sum) is array
    try:
        hvd.allreduce(array)
    except UnsupportedError as error:
        return same, array.array.get().tolist(), str(error)
    return same, array.array.get().tolist(), ""


def cupys() -> tuple[str, list[float]]:
    """An array of a package called cupy, which does not say where its functions are."""
    hvd = arrays()
    package = ModuleType("cupy")
    vars(package)["empty"] = lambda shape, dtype: Cupys(hvd.empty(shape, dtype))

    class Cupys:
        __module__ = "cupy"
        __array__ = None

        def __init__(self, of: Any) -> None:
            self.of, self.shape, self.dtype = of, of.shape, of.dtype
            self.__cuda_array_interface__ = of.__cuda_array_interface__

    sys.modules["cupy"] = package
    try:
        total = hvd.allreduce(Cupys(hvd.on_gpu(np.arange(3.0))), op=hvd.Sum)
    finally:
        del sys.modules["cupy"]
    return type(total).__name__, total.of.get().tolist()


def read_only() -> str:
    hvd = arrays()
    memory = hvd.on_gpu(np.ones(3)).memory
    memory.flags.writeable = False
    try:
        hvd.allreduce_(hvd.GpuArray(memory, None))
    except InvalidRequestError as error:
        return str(error)
    return ""


def staged() -> tuple[str, list[float], list[float], bool]:
    hvd = arrays()
    array = hvd.on_gpu(np.arange(3.0))
    total = hvd.allreduce(array, op=hvd.Sum)
    hvd.allreduce_(array, op=hvd.Max)
    averaged = isinstance(hvd.allreduce(hvd.on_gpu(np.arange(3))), hvd.GpuArray)
    return context.engine().device_plane(0, "cuda"), total.get().tolist(), array.get().tolist(), averaged


def average_of_integers() -> tuple[str, list[int]]:
    hvd = arrays()
    found = hvd.allreduce(hvd.on_gpu(np.array([1, 5]) + 2 * hvd.rank()), op=hvd.Average)
    return context.engine().device_plane(0, "cuda"), found.get().tolist()


# -- tests ------------------------------------------------------------------------------------------------------------


def test_arrays_of_cupy_need_not_name_their_package(two: Ranks) -> None:
    assert two.run(cupys) == [("Cupys", [0.0, 2.0, 4.0])] * 2


def test_dlpack_arrays_are_reduced_in_place(two: Ranks) -> None:
    for same, values, refused in two.run(dlpack):
        assert same
        assert values == [1.0, 3.0, 5.0, 7.0]
        assert "has no __array_namespace__" in refused


def test_a_read_only_array_is_not_written(two: Ranks) -> None:
    assert all("is read-only" in text for text in two.run(read_only))


def test_what_the_plane_can_not_do_goes_through_the_host(two: Ranks) -> None:
    assert two.run(average_of_integers) == [("cuda/ipc", [2, 6])] * 2


def test_without_the_plane_arrays_are_staged_and_stay_arrays_of_the_gpu(staging: Ranks) -> None:
    assert staging.run(staged) == [("", [0.0, 2.0, 4.0], [0.0, 1.0, 2.0], True)] * 2

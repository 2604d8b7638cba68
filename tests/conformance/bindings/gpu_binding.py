"""hvdlab.numpy with arrays of a simulated GPU, on which the plane `cuda/ipc` works."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.bindings.harness import Values
from conformance.bindings.numpy_binding import NumpyUnderTest
from hvdlab.collectives.types import DType


class GpuArraysUnderTest(NumpyUnderTest):
    module = "support.fakes.gpu_arrays"

    @property
    def arrays(self) -> Any:
        from support.fakes import (
            gpu_arrays as fake_gpu_arrays,  # only in ranks: it gives its process a simulated GPU
        )

        return fake_gpu_arrays

    def tensor(self, values: Values, dtype: DType) -> Any:
        return self.arrays.on_gpu(super().tensor(values, dtype))

    def values(self, tensor: Any) -> Values:
        assert isinstance(tensor, self.arrays.GpuArray), f"a {type(tensor).__name__} has left the GPU"
        return super().values(tensor.get())

    def dtype(self, tensor: Any) -> DType:
        return super().dtype(tensor)

    def layouts(self, values: Values) -> dict[str, Any]:
        wide = self.arrays.empty((values.shape[0], 2 * values.shape[1]), np.float32)
        strided = self.arrays.GpuArray(wide.memory[:, ::2], wide.owner)
        strided.set(values.astype(np.float32))
        other = self.arrays.on_gpu(values.astype(np.float32).T.copy())
        return {"fortran": self.arrays.GpuArray(other.memory.T, other.owner), "strided": strided}

    def unsupported(self) -> dict[str, tuple[Any, str]]:
        return {"complex": (self.arrays.on_gpu(np.ones(2, complex)), "convert to one of")}


BINDING = GpuArraysUnderTest()

"""hvdlab.numpy, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.bindings.harness import BindingUnderTest, Values
from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.types import DType

_TYPES: dict[DType, np.dtype[Any]] = {
    dtype: storage_type(dtype) for dtype in DType if dtype is not DType.BF16
}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}


class NumpyUnderTest(BindingUnderTest):
    module = "hvdlab.numpy"
    lacks = frozenset({"average", "compression", "gradients"})
    scalars_are_rows = True
    dtypes = tuple(_TYPES)  # numpy has no bfloat16 of its own
    not_a_tensor = "text", "arrays of <U4 can't be sent"

    def tensor(self, values: Values, dtype: DType) -> Values:
        return np.asarray(values).astype(_TYPES[dtype])

    def values(self, tensor: Values) -> Values:
        return tensor.astype(np.float64)

    def dtype(self, tensor: Values) -> DType:
        return _DTYPES[tensor.dtype]

    def layouts(self, values: Values) -> dict[str, Values]:
        plain = values.astype(np.float32)
        wide = np.zeros((values.shape[0], 2 * values.shape[1]), np.float32)
        wide[:, ::2] = plain
        return {"fortran": np.asfortranarray(plain), "strided": wide[:, ::2]}

    def unsupported(self) -> dict[str, tuple[Any, str]]:
        return {
            "complex": (np.ones(2, complex), "convert to one of"),
            "byte order": (np.ones(2, np.dtype(np.float32).newbyteorder()), "native byte order"),
        }

    def gradients(
        self, function: Callable[..., Any], tensors: list[Any], weights: list[Values]
    ) -> list[Values]:
        raise NotImplementedError


BINDING = NumpyUnderTest()

"""hvdlab.mxnet, for the conformance suite, in the environment that ``make mxnet`` makes. Imported in the ranks' processes only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.bindings.harness import BindingUnderTest, Values
from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.types import DType

_HAS = (DType.F16, DType.F32, DType.F64, DType.I8, DType.U8, DType.I32, DType.I64, DType.BOOL)
_TYPES = {dtype: storage_type(dtype) for dtype in _HAS}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}


class MXNetUnderTest(BindingUnderTest):
    module = "hvdlab.mxnet"
    lacks = frozenset({"adasum", "async", "compression", "gradients"})
    dtypes = _HAS
    not_a_tensor = object(), "takes an mx.nd.NDArray, not object."

    @property
    def mx(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses names that numpy and Python are about to drop
            import mxnet
        mxnet.util.set_np_shape(True)  # otherwise 0 in a shape means that it is not known yet
        return mxnet

    def tensor(self, values: Values, dtype: DType) -> Any:
        array = np.asarray(values).astype(_TYPES[dtype])
        return self.mx.nd.array(array, dtype=array.dtype)

    def values(self, tensor: Any) -> Values:
        values: Values = np.asarray(tensor.asnumpy(), np.float64)
        return values

    def dtype(self, tensor: Any) -> DType:
        return _DTYPES[np.dtype(tensor.dtype)]

    def counts(self, received: Any) -> list[int]:
        found: list[int] = received.asnumpy().tolist()
        return found

    def layouts(self, values: Values) -> dict[str, Any]:
        return {}  # its arrays are all contiguous

    def unsupported(self) -> dict[str, tuple[Any, str]]:
        rows = self.mx.nd.sparse.zeros("row_sparse", (3, 2))
        return {"row-sparse": (rows, "tostype('default')")}

    def gradients(
        self, function: Callable[..., Any], tensors: list[Any], weights: list[Values]
    ) -> list[Values]:
        raise NotImplementedError


BINDING = MXNetUnderTest()

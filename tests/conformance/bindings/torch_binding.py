"""hvdlab.torch, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from conformance.bindings.harness import BindingUnderTest, Values
from hvdlab.collectives.types import DType

_TYPES = {dtype: getattr(torch, dtype.label) for dtype in DType}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}


class TorchUnderTest(BindingUnderTest):
    module = "hvdlab.torch"
    not_a_tensor = [1.0], "takes a torch.Tensor, not list."

    def tensor(self, values: Values, dtype: DType) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=_TYPES[dtype])

    def values(self, tensor: torch.Tensor) -> Values:
        return tensor.detach().double().numpy()

    def dtype(self, tensor: torch.Tensor) -> DType:
        return _DTYPES[tensor.dtype]

    def layouts(self, values: Values) -> dict[str, torch.Tensor]:
        plain = self.tensor(values, DType.F32)
        wide = torch.zeros(values.shape[0], 2 * values.shape[1])
        wide[:, ::2] = plain
        return {"transposed": plain.t().contiguous().t(), "strided": wide[:, ::2]}

    def unsupported(self) -> dict[str, tuple[Any, str]]:
        return {"complex": (torch.ones(2, dtype=torch.cfloat), "view_as_real")}

    def gradients(
        self, function: Callable[..., Any], tensors: list[Any], weights: list[Values]
    ) -> list[Values]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        pairs = zip(outputs, weights, strict=True)
        loss = sum((output * torch.tensor(weight, dtype=output.dtype)).sum() for output, weight in pairs)
        loss.backward()
        return [self.values(leaf.grad) for leaf in leaves]


BINDING = TorchUnderTest()

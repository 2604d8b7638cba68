"""hvdlab.tensorflow, for the conformance suite. Imported in the ranks' processes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.bindings.harness import BindingUnderTest, Values
from hvdlab.collectives.types import DType


class TensorFlowUnderTest(BindingUnderTest):
    module = "hvdlab.tensorflow"
    lacks = frozenset({"async", "in place"})
    not_a_tensor = object(), "takes a tf.Tensor, not object."

    @property
    def tf(self) -> Any:
        import tensorflow

        return tensorflow

    def tensor(self, values: Values, dtype: DType) -> Any:
        return self.tf.cast(self.tf.constant(np.asarray(values)), dtype.label)

    def values(self, tensor: Any) -> Values:
        values: Values = self.tf.cast(tensor, "float64").numpy()
        return np.asarray(values)

    def dtype(self, tensor: Any) -> DType:
        return next(dtype for dtype in DType if dtype.label == tensor.dtype.name)

    def layouts(self, values: Values) -> dict[str, Any]:
        return {}  # its tensors are all contiguous

    def unsupported(self) -> dict[str, tuple[Any, str]]:
        tf = self.tf
        return {"complex": (tf.ones(2, tf.complex64), "tf.math.real"), "text": (tf.constant(["a"]), "string")}

    def gradients(
        self, function: Callable[..., Any], tensors: list[Any], weights: list[Values]
    ) -> list[Values]:
        tf = self.tf
        with tf.GradientTape() as tape:
            for tensor in tensors:
                tape.watch(tensor)
            outputs = function(*tensors)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            pairs = zip(outputs, weights, strict=True)
            loss = tf.add_n(
                [tf.reduce_sum(output * tf.cast(weight, output.dtype)) for output, weight in pairs]
            )
        return [self.values(gradient) for gradient in tape.gradient(loss, tensors)]


BINDING = TensorFlowUnderTest()

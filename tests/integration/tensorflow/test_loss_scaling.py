"""Loss scaling around distributed optimizers, where the gradients of one rank alone are infinite."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from support.ranks.resident import Ranks


def _scaled(version: int, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return loss scaling by 2 around the optimizer, a function ``f(gradients, variables)`` that applies, and the scale."""
    if version == 3:
        scaled = importlib.import_module("keras").optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
        return scaled, scaled.apply, lambda: float(scaled.dynamic_scale.numpy())
    scaled = importlib.import_module("tf_keras").mixed_precision.LossScaleOptimizer(
        optimizer, initial_scale=2.0
    )

    def apply(gradients: Any, variables: Any) -> None:
        unscaled = scaled.get_unscaled_gradients(gradients)
        scaled.apply_gradients(list(zip(unscaled, variables, strict=True)))

    return scaled, apply, lambda: float(scaled.loss_scale.numpy())


def _variables(version: int, count: int) -> list[Any]:
    made: Any = importlib.import_module("keras" if version == 3 else "tensorflow").Variable
    return [made(1.0) for _ in range(count)]


def overflow_in_first_pass(version: int) -> tuple[float, float]:
    """Return the variable and the scale after three passes, of which rank 1's first one overflows."""
    import tensorflow as tf

    import hvdlab.tensorflow.keras as hvd

    keras = importlib.import_module("keras" if version == 3 else "tf_keras")
    variables = _variables(version, 1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    scaled, apply, scale = _scaled(version, optimizer)
    scaled.build(variables)
    step = tf.function(lambda gradient: apply([gradient], variables), autograph=False)
    for number in range(3):
        overflows = number == 0 and hvd.rank() == 1
        step(tf.constant(np.inf if overflows else 2.0 * (hvd.rank() + 1), tf.float32))
    return float(np.array(variables[0])), scale()


def overflow_in_step(version: int, legacy: bool = False, local: bool = False) -> tuple[list[float], float]:
    """Return two variables and the scale after a step in which the first one's gradient, which may be local, overflows on rank 1."""
    import tensorflow as tf

    import hvdlab.tensorflow.keras as hvd

    keras = importlib.import_module("keras" if version == 3 else "tf_keras")
    variables = _variables(version, 2)
    optimizers = keras.optimizers.legacy if legacy else keras.optimizers
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1))
    if local:
        optimizer.register_local_var(variables[0])
    scaled, apply, scale = _scaled(version, optimizer)
    if not legacy:
        scaled.build(variables)
    apply([tf.constant(np.inf if hvd.rank() == 1 else 2.0, tf.float32), tf.constant(2.0)], variables)
    return [float(np.array(variable)) for variable in variables], scale()


@pytest.mark.parametrize(("version", "legacy"), [(3, False), (2, False), (2, True)])
def test_overflow_of_one_rank_skips_step_of_all(two: Ranks, version: int, legacy: bool) -> None:
    assert two.run(overflow_in_step, version, legacy, timeout=60) == [([1.0, 1.0], 1.0)] * 2


@pytest.mark.parametrize("version", [3, 2])
def test_overflow_of_one_rank_skips_pass_of_all(two: Ranks, version: int) -> None:
    values, scales = zip(*two.run(overflow_in_first_pass, version, timeout=100), strict=True)
    # Passes 1 and 2 make the step; gradients of 2 and 4 are divided by a scale of 1.
    np.testing.assert_allclose(values, 1 - 0.1 * (4 + 8) / 2)
    assert scales == (1.0, 1.0)


@pytest.mark.parametrize("version", [3, 2])
def test_overflow_of_local_variable_skips_step_of_all(two: Ranks, version: int) -> None:
    assert two.run(overflow_in_step, version, False, True, timeout=100) == [([1.0, 1.0], 1.0)] * 2

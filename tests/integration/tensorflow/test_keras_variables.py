"""Variables of Keras that programs name, and TensorFlow's behind them, which Keras applies gradients to."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from support.ranks.resident import Ranks


def sizes_of_groups() -> list[int]:
    """Return how many gradients each collective reduces where groups are lists of a model's variables."""
    import keras
    import tensorflow as tf

    import hvdlab.tensorflow.keras as hvd
    from hvdlab.tensorflow import gradient_tape

    variables = [keras.Variable(np.ones(2, np.float32)) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=[variables[:2], variables[2:]])
    sizes: list[int] = []

    def counted(tensors: Any, **keywords: Any) -> Any:
        sizes.append(len(tensors))
        return list(tensors)

    with (
        mock.patch.object(gradient_tape, "grouped_allreduce", counted),
        mock.patch.object(gradient_tape, "allreduce", lambda tensor, **keywords: counted([tensor])[0]),
    ):
        optimizer.apply_gradients([(tf.ones(2), variable) for variable in variables])
    return sizes


def gradient_of_local_source() -> list[float]:
    """Return the gradient of a source that was registered as TensorFlow's variable and is differentiated as that of Keras."""
    import keras
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    variable = keras.Variable(1.0)
    with tf.GradientTape() as recorded:
        loss = variable * float(hvd.rank() + 1)
    tape = hvd.DistributedGradientTape(recorded, scale_local_gradients=False)
    tape.register_local_source(variable.value)
    local, shared = tape.get_local_and_global_gradients([tf.constant(1.0)], [variable])
    assert (len(local), len(shared)) == (1, 0)
    return [float(each) for each in tape.gradient(loss, [variable])]


def test_groups_of_keras_variables_are_reduced_together(two: Ranks) -> None:
    assert two.run(sizes_of_groups, timeout=100) == [[2, 2]] * 2


def test_local_source_stays_local_by_either_variable(two: Ranks) -> None:
    assert two.run(gradient_of_local_source, timeout=100) == [[1.0], [2.0]]

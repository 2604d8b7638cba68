"""``hvd.watch_divergence()`` for models of Keras, in ``fit`` and in a loop."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError
from support.ranks.resident import Ranks


def _model(version: int, hvd: Any) -> tuple[Any, Any]:
    keras: Any = importlib.import_module("keras" if version == 3 else "tf_keras")
    if hvd.rank() == 1:
        # A model that only this rank has made: Keras numbers names within each process, so the ranks' names differ.
        keras.Sequential([keras.layers.Dense(3)]).build((1, 2))
    model = keras.Sequential(
        [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    return keras, model


def watched(version: int) -> None:
    import tensorflow as tf

    import hvdlab.keras
    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    assert hvdlab.keras.watch_divergence is hvd_keras.watch_divergence is hvd.watch_divergence
    assert hvdlab.keras.DivergenceError is hvd_keras.DivergenceError is hvd.DivergenceError
    keras, model = _model(version, hvd)
    random = np.random.default_rng(hvd.rank())
    x, y = random.normal(size=(64, 4)), random.normal(size=(64, 1))
    watch = hvd.watch_divergence(model, every=4)
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[broadcast])
    assert (watch.step, watch.checks) == (8, 2)

    class Part(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and hvd.rank() == 1:
                weight = self.model.layers[-1].bias
                weight.assign(weight + 1e-4)

    with pytest.raises(hvd.DivergenceError, match=r"differ in `\[5\] .*bias.*`, since step 10: ") as caught:
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[Part()])
    assert (caught.value.step, caught.value.groups) == (12, ((0,), (1,)))
    again = hvd.watch_divergence(model, every=1)
    with pytest.raises(hvd.DivergenceError, match="noticed after step 1"):
        again.step_ended()
    hvd.broadcast_variables(model.variables, 0)
    for _ in range(2):
        again.step_ended()
    assert again.checks == 3
    again.close()
    model.fit(x, y, batch_size=16, verbose=0)
    assert (again.step, watch.step) == (3, 12)
    for value in (tf.ones(1), keras.optimizers.SGD()):
        with pytest.raises(InvalidRequestError, match="takes a model of Keras"):
            hvd.watch_divergence(value)
    with pytest.raises(InvalidRequestError, match="from 1, not 0"):
        hvd.watch_divergence(model, 0)


def test_models_that_part(two: Ranks) -> None:
    for version in (3, 2):
        two.run(watched, version, timeout=100)

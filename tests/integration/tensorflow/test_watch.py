"""``hvd.watch()`` for Keras: metrics of the norm of the gradients, the loss scale, the learning rate and the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError
from support.metric_points import recorded_points
from support.ranks.resident import Ranks

RATE = 0.25


def _keras(version: int) -> Any:
    import importlib

    return importlib.import_module("keras" if version == 3 else "tf_keras")


def _data() -> tuple[Any, Any]:
    import hvdlab.tensorflow as hvd

    random = np.random.default_rng(hvd.rank())
    return random.normal(size=(8, 3)).astype(np.float32), random.normal(size=(8, 2)).astype(np.float32)


def _model(keras: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])


def _changes(keras: Any) -> tuple[Any, list[float]]:
    """Return a callback, and a list of the gradients' norms, which it computes from the changes that SGD's steps
    make."""
    norms: list[float] = []

    class Changes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.before = self.model.get_weights()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = self.model.get_weights()
            parts = [np.sum((a - b).astype(np.float64) ** 2) for a, b in zip(now, self.before, strict=True)]
            norms.append(float(np.sqrt(np.sum(parts))) / RATE)
            self.before = now

    return Changes(), norms


def fits(version: int) -> None:
    """Check the norm of the reduced gradients after every few steps, whether the optimizer was used before it was
    watched or not."""
    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    keras, (x, y) = _keras(version), _data()
    model = _model(keras)
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(RATE)), loss="mse")
    model.fit(x, y, batch_size=4, verbose=0)  # traces a step
    steps = 2
    changes, norms = _changes(keras)
    with recorded_points() as points, hvd.watch(model, every=2) as watch:
        model.fit(x, y, batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=[changes])
        found = points()
        assert [step for step, _ in found["gradient_norm"]] == [4, 6, 8]
        assert [value for _, value in found["gradient_norm"]] == pytest.approx(norms[1::2], rel=1e-3)
        assert hvd.allgather_object(found["gradient_norm"]) == [found["gradient_norm"]] * hvd.size()
        assert [step for step, _ in found["learning_rate"]] == [3, 4, 5, 6, 7, 8]
        assert "loss_scale" not in found
        assert watch.step == steps + 6
        assert watch.batch_size == 4
        # Another watch, with its own batch size, replaces the first; now Keras runs the steps eagerly.
        model.compile(model.optimizer, loss="mse", run_eagerly=True)
        again = hvd_keras.watch(model, batch_size=100, every=1)
        assert not watch._measuring
        changes, norms = _changes(keras)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=[changes])
        found = points()
        assert [step for step, _ in found["gradient_norm"]] == [9, 10]
        assert [value for _, value in found["gradient_norm"]] == pytest.approx(norms, rel=1e-3)
        (_, seconds), (_, rate) = found["step_time"][0], found["samples_per_second"][0]
        assert rate * seconds == pytest.approx(100)
        again.close()
        again.close()
        model.fit(x, y, batch_size=4, verbose=0)
        found = points()
        assert "gradient_norm" not in found
        assert "step_time" in found  # since the optimizer is distributed


def plain_optimizers(version: int) -> None:
    """Check that an optimizer that is not distributed is measured, too, until the watch is closed."""
    import hvdlab.keras

    keras, (x, y) = _keras(version), _data()
    optimizers = [keras.optimizers.SGD(RATE)]
    if version == 2:
        optimizers.append(keras.optimizers.legacy.SGD(RATE))
    for optimizer in optimizers:
        model, kind = _model(keras), type(optimizer)
        model.compile(optimizer, loss="mse")
        changes, norms = _changes(keras)
        with recorded_points() as points:
            watch = hvdlab.keras.watch(model, optimizer, every=1)
            assert isinstance(optimizer, kind)
            model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=[changes])
            found = points()
            assert [value for _, value in found["gradient_norm"]] == pytest.approx(norms, rel=1e-3)
            assert [step for step, _ in found["step_time"]] == [2]
            watch.close()
            assert type(optimizer) is kind
            model.fit(x, y, batch_size=4, verbose=0)
            assert not {"gradient_norm", "step_time", "learning_rate"} & set(points())


def _looped(keras: Any, rate: Any, wrapped: Callable[[Any], Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the metrics of four steps of the user's own loop, of two passes each, with sparse gradients."""
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    table = (
        keras.Variable(np.ones((4, 2), np.float32))
        if keras.__name__ == "keras"
        else tf.Variable(tf.ones((4, 2)))
    )
    source = table if isinstance(table, tf.Variable) else table.value
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate), sparse_as_dense=True, backward_passes_per_step=2
    )
    optimizer.build([table])

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(source, [0, 2])) * (hvd.rank() + 1.0)
        optimizer.apply_gradients([(tape.gradient(loss, source), table)])

    run = wrapped(step)
    with recorded_points() as points, hvd.watch(_model(keras), optimizer, batch_size=7, every=2) as watch:
        for _ in range(4):
            run()
            watch.step_ended()
        return points()


def loops(version: int) -> None:
    """Run steps of the user's own loop, in functions and outside."""
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    keras = _keras(version)
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 1, 0.5)
    for wrapped, rate, told in ((tf.function, RATE, [1, 2, 3, 4]), (lambda step: step, schedule, [2, 4])):
        found = _looped(keras, rate, wrapped)
        # The passes of a step add up. Four elements have a gradient, which is the mean over the ranks.
        norm = 2 * 2 * (hvd.size() + 1) / 2
        assert found["gradient_norm"] == [(2, pytest.approx(norm)), (4, pytest.approx(norm))]
        assert [step for step, _ in found["step_time"]] == [2, 3, 4]
        assert [step for step, _ in found["samples_per_second"]] == [2, 3, 4]
        assert [step for step, _ in found["learning_rate"]] == told


def scaled_losses(version: int) -> None:
    """The loss scale before the step, and the norm divided by it; a skipped step has no norm."""
    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    keras, (x, y) = _keras(version), _data()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = _model(keras)
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(RATE)), loss="mse")
    finally:
        keras.mixed_precision.set_global_policy("float32")
    changes, norms = _changes(keras)
    with recorded_points() as points, hvd.watch(model, every=1):
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=[changes])
        found = points()
        assert [value for _, value in found["gradient_norm"]] == pytest.approx(norms, rel=1e-2)
        assert found["loss_scale"] == [(1, 2.0**15), (2, 2.0**15)]
        model.fit(x[:4], y[:4] * np.inf, batch_size=4, verbose=0)
        found = points()
        assert "gradient_norm" not in found
        assert found["loss_scale"] == [(3, 2.0**15)]
        model.fit(x[:4], y[:4], batch_size=4, verbose=0)
        assert points()["loss_scale"] == [(4, 2.0**14)]


def several_at_a_time(version: int) -> None:
    """Check that of steps that are executed together, the norm of the last is recorded."""
    import hvdlab.tensorflow as hvd

    keras, (x, y) = _keras(version), _data()
    model = _model(keras)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, loss="mse", steps_per_execution=2)
    with recorded_points() as points, hvd.watch(model, every=4):
        model.fit(x, y, batch_size=2, epochs=2, verbose=0)
        steps = [step for step, _ in points()["gradient_norm"]]
    assert steps == [4, 8]


def refusals(version: int) -> None:
    import hvdlab.tensorflow as hvd

    keras = _keras(version)
    model = _model(keras)
    optimizer = keras.optimizers.SGD(RATE)
    kind = type(optimizer)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.watch(object()), "takes a model of Keras, not a object"),
        (lambda: hvd.watch(model), r"compile the model before, or give optimizer=\."),
        (lambda: hvd.watch(model, "sgd"), "takes an optimizer of Keras, not a str"),
        (lambda: hvd.watch(model, optimizer, every=-1), "every= is a number of steps, not -1"),
        (lambda: hvd.watch(model, optimizer, batch_size=0), "batch_size= is the number of samples"),
    ]
    for call, text in cases:
        with pytest.raises(InvalidRequestError, match=text):
            call()
    assert type(optimizer) is kind


@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize(
    "function",
    [fits, plain_optimizers, loops, scaled_losses, several_at_a_time, refusals],
    ids=lambda function: function.__name__,
)
def test_watched_trainings(two: Ranks, function: Callable[[int], None], version: int) -> None:
    two.run(function, version, timeout=100)

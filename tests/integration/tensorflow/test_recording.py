"""``hvd.record()`` for models of Keras, in ``fit`` and in a loop: the last steps, and the batch that made the training fail."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from support.ranks.resident import Ranks

BATCH, BATCHES = 4, 6


def _keras(version: int) -> Any:
    import importlib

    return importlib.import_module("keras" if version == 3 else "tf_keras")


def _data(bad: int) -> tuple[Any, Any]:
    """Return data for batches of :data:`BATCH` rows; if ``bad``, a row of that batch has a NaN."""
    x = np.random.default_rng(5).normal(size=(BATCH * BATCHES, 3)).astype(np.float32)
    if bad:
        x[BATCH * (bad - 1) + 2, 1] = np.nan
    return x, x.sum(1, keepdims=True)


def fits(version: int) -> None:
    import tensorflow as tf

    import hvdlab.keras
    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras
    from hvdlab.bindings import step_record

    assert hvdlab.keras.record is hvd_keras.record is hvd.record
    keras = _keras(version)
    x, y = _data(bad=4 if hvd.rank() == 1 else 0)
    for options in ({}, {"run_eagerly": True}):
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", **options)
        with hvd.record(model, last=5) as recorded:
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            model.evaluate(x, y, verbose=0)
            model(x, training=True)
            assert [step.number for step in recorded.steps] == list(range(2, BATCHES + 1))
            third = recorded.steps[1]
            assert np.isfinite(float(third.loss))
            assert float(third.norm) > 0
            assert "[0] float32[4, 3] #" in str(third)
            assert "[1] float32[4, 1] #" in str(third)
            wrong = recorded.first_wrong
            assert wrong is not None
            # Rank 1 has the bad batch. Recorded gradients are a rank's own, so rank 0 first sees the next step's loss.
            assert (wrong.number, wrong.wrong) == ((4, "inputs") if hvd.rank() else (5, "loss"))
            assert "NOT FINITE" in str(wrong) or not hvd.rank()
            assert step_record.suspects() == (wrong.number, 0 if hvd.rank() else 1, str(wrong))
            found: Any = pickle.loads(pickle.dumps(recorded.replay(3)))  # noqa: S301  # made here
            rows = slice(2 * BATCH, 3 * BATCH)
            np.testing.assert_array_equal(found.args[0], x[rows])
            np.testing.assert_array_equal(found.args[1], y[rows])
            assert (found.rank, found.step, found.loss) == (hvd.rank(), 3, float(third.loss))
            if version == 3:
                fresh = keras.models.clone_model(model)
                states = [each.numpy() for each in fresh.variables]
                np.testing.assert_array_equal(found.run(fresh), found.run(fresh))  # dropout as well
                np.testing.assert_array_equal(states[-1], fresh.variables[-1].numpy())
            # Recording a model again starts over, and a model that is not recorded any more still trains.
            again = hvd.record(model)
            assert not recorded.steps
            model.train_on_batch(x[:BATCH], y[:BATCH])
            assert len(again.steps) == 1
            again.close()
            model.train_on_batch(x[:BATCH], y[:BATCH])
            assert "train_step" not in vars(model)
    assert step_record.newest() is None
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()


def the_model_went_wrong(version: int) -> None:
    """Check that the recorded loss, and in half precision the norm, are those that Keras would have without loss
    scaling."""
    import hvdlab.tensorflow as hvd

    keras = _keras(version)
    x, y = _data(bad=0)
    norms = []
    for policy in ("float32", "mixed_float16"):
        keras.mixed_precision.set_global_policy(policy)
        try:
            model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones", dtype=policy)])
            model.build((None, 3))
        finally:
            keras.mixed_precision.set_global_policy("float32")
        optimizer = keras.optimizers.SGD(0.0)
        model.compile(
            keras.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer), initial_scale=128)
            if policy != "float32"
            else hvd.DistributedOptimizer(optimizer),
            loss="mse",
        )
        with hvd.record(model) as recorded:
            model.train_on_batch(x[:BATCH], y[:BATCH] + 1)
            norms.append(float(recorded.steps[0].norm))
            expected = float(np.mean((x[:BATCH].sum(1, keepdims=True) - y[:BATCH] - 1) ** 2))
            assert float(recorded.steps[0].loss) == pytest.approx(expected, rel=1e-2)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    kernel = x[:BATCH].T @ np.full((BATCH, 1), -2.0 / BATCH)
    assert norms[0] == pytest.approx(float(np.sqrt(np.sum(kernel**2) + 4.0)), rel=1e-4)


def steps_of_ones_own(version: int) -> None:
    """Run the user's own train_step, with conditions that AutoGraph rewrites for Keras 2, and several passes per
    step."""
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    keras = _keras(version)

    class Doubled(keras.Sequential):  # type: ignore[misc,name-defined,unused-ignore]
        def train_step(self, data: Any) -> Any:
            x, y = data
            if version == 2 and tf.reduce_sum(x) > 1e9:
                x = x * 0
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True)) * 2
            slopes = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(slopes, self.trainable_variables, strict=True))
            return {"loss": loss}

    x, y = _data(bad=0)
    model = Doubled([keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2)
    model.compile(optimizer, loss="mse", steps_per_execution=2)
    with hvd.record(model, memory=BATCH * 16) as recorded:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert [step.number for step in recorded.steps] == list(range(1, BATCHES + 1))
        assert [step.norm is not None for step in recorded.steps] == [False, True] * (BATCHES // 2)
        assert all(step.loss is not None for step in recorded.steps)
        assert [step.batch is not None for step in recorded.steps] == [False] * (BATCHES - 1) + [True]


def loops() -> None:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    weights = tf.Variable(tf.ones((3, 1)))
    recorded = hvd.record()

    @tf.function  # type: ignore[untyped-decorator,unused-ignore]
    def step(batch: Any, y: Any) -> Any:
        recorded.batch(batch, y=y, mode="train")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((batch["x"] @ weights - y) ** 2)
        recorded.loss(loss)
        slopes = tape.gradient(loss, [weights])
        recorded.gradients(slopes)
        return hvd.grouped_allreduce(slopes)

    x, y = _data(bad=2)
    for number in range(3):
        rows = slice(BATCH * number, BATCH * number + BATCH)
        ragged, table = tf.ragged.constant([[1.0], [2.0, 3.0]]), np.arange(4)
        step(
            {"x": tf.constant(x[rows]), "r": ragged, "n": tf.constant(table), "name": tf.constant("a")},
            y[rows] + 1,
        )
    lines = list(map(str, recorded.steps))
    assert "[0].x float32[4, 3] #" in lines[0]
    assert "[0].r float32[2, -1] #" in lines[0]
    assert [step.wrong for step in recorded.steps] == ["", "inputs", ""]
    assert recorded.steps[0].loss is not None
    assert float(recorded.steps[2].norm) > 0
    assert recorded.replay(3).kwargs["mode"] == "train"
    recorded.close()
    step({"x": tf.constant(x[:4]), "r": ragged, "n": tf.constant(table), "name": tf.constant("a")}, y[:4])
    assert not recorded.steps
    with hvd.record() as eager:
        given = np.ones(3)
        eager.batch(given)
        given[0] = 7
        eager.loss(2.0)
        eager.gradients([tf.ones(4), None, tf.IndexedSlices(tf.ones((1, 5)), tf.constant([0]))])
        np.testing.assert_array_equal(eager.steps[0].batch[0][0], np.ones(3))  # type: ignore[index,unused-ignore]
        assert (float(eager.steps[0].loss), float(eager.steps[0].norm)) == (2.0, 3.0)
        assert "input" not in str(eager.steps[0])
        with pytest.raises(UnsupportedError, match="steps that XLA compiles"):
            tf.function(eager.loss, jit_compile=True)(tf.ones(()))


def refused() -> None:
    import hvdlab.tensorflow as hvd

    with pytest.raises(InvalidRequestError, match=r"model= of hvd.record\(\) is no int."):
        hvd.record(3)
    with pytest.raises(InvalidRequestError, match="from 1, not 0"):
        hvd.record(last=0)
    for version in (3, 2):
        keras = _keras(version)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", jit_compile=True)
        with pytest.raises(UnsupportedError, match=r"model.compile\(..., jit_compile=False\)"):
            hvd.record(model)


@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize(
    "function", [fits, the_model_went_wrong, steps_of_ones_own], ids=lambda function: function.__name__
)
def test_steps_of_a_model(two: Ranks, function: Callable[[int], None], version: int) -> None:
    two.run(function, version, timeout=100)


@pytest.mark.parametrize("function", [loops, refused], ids=lambda function: function.__name__)
def test_steps_of_a_loop(two: Ranks, function: Callable[[], None]) -> None:
    two.run(function, timeout=100)

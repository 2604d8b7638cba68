"""Tapes, optimizers, layers, callbacks and states on two ranks, against the same arithmetic in numpy."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError, MismatchError, UnsupportedError
from support.metric_points import recorded_points
from support.ranks.resident import Ranks


def _modules() -> tuple[Any, Any, Any]:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    return tf, hvd, hvd_keras


# -- tapes ------------------------------------------------------------------------------------------------------------


def tapes() -> None:
    tf, hvd, _ = _modules()
    rank, size = hvd.rank(), hvd.size()
    v, w, table = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(tf.ones((4, 2)))
    unused = tf.Variable(1.0)

    def step(**options: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(v * v) * (rank + 1) + w * (rank + 1)
            loss += tf.reduce_sum(tf.gather(table, [rank, 0]))
        tape = hvd.DistributedGradientTape(tape, **options)
        tape.register_local_source(w)
        of_v, of_w, of_table, nothing = tape.gradient(loss, [v, w, table, unused])
        assert nothing is None
        assert isinstance(tape, tf.GradientTape)
        return of_v, of_w, tf.convert_to_tensor(of_table), tape.gradient(loss, {"v": v})["v"]

    mean = (size + 1) / 2
    rows = np.zeros((4, 2))
    for r in range(size):
        rows[r] += 1 / size
        rows[0] += 1 / size
    cases: list[dict[str, Any]] = [
        {},
        {"sparse_as_dense": True},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": [[v], [w, table]], "sparse_as_dense": True},
        {"num_groups": 1, "compression": hvd.Compression.fp16, "sparse_as_dense": True},
    ]
    for options in cases:
        for call in (step, tf.function(step, autograph=False)):
            of_v, of_w, of_table, alone = call(**options)
            np.testing.assert_allclose(of_v, 2 * np.array([1.0, 2.0]) * mean, err_msg=str(options))
            np.testing.assert_allclose(alone, of_v)
            np.testing.assert_allclose(of_w, (rank + 1) / size)
            np.testing.assert_allclose(of_table, rows)
    np.testing.assert_allclose(step(op=hvd.Sum, scale_local_gradients=False)[1], rank + 1)
    with pytest.raises(InvalidRequestError, match="distributed already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(ValueError, match=r"is for op=hvd\.Average only"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)


def partial_tapes() -> None:
    tf, hvd, _ = _modules()
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    other = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other(layer(tf.fill([1, 1], float(hvd.rank() + 1)))))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    local, shared = tape.gradient(loss, [layer.trainable_weights[0], other.trainable_weights[0]])
    np.testing.assert_allclose(local, [[(hvd.rank() + 1) / hvd.size()]])
    np.testing.assert_allclose(shared, [[(hvd.size() + 1) / 2]])


def tapes_of_one_recording() -> None:
    """Check that tapes made of one plain tape keep their own settings and local sources."""
    tf, hvd, _ = _modules()
    v, own, ranks = tf.Variable(1.0), hvd.rank() + 1.0, sum(range(1, hvd.size() + 1))
    with tf.GradientTape(persistent=True) as plain:
        loss = v * own
    summed, averaged = (hvd.DistributedGradientTape(plain, op=op) for op in (hvd.Sum, hvd.Average))
    local = hvd.DistributedGradientTape(plain, scale_local_gradients=False)
    local.register_local_source(v)
    found = [float(tape.gradient(loss, v)) for tape in (plain, summed, averaged, local)]
    assert found == [own, ranks, ranks / hvd.size(), own]


def rewritten() -> list[str]:
    """Return the functions whose source AutoGraph rewrote when it traced a step."""
    tf, hvd, _ = _modules()
    v = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v) * (hvd.rank() + 1)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [v])
        hvd.allreduce(loss)
        optimizer.apply_gradients([(gradient, v)])
        return gradient

    with TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            np.testing.assert_allclose(step(), 2 * np.array([1.0, 2.0]) * (hvd.size() + 1) / 2)
        finally:
            tempfile.tempdir = before
        sources = [path.read_text() for path in Path(folder).glob("__autograph*.py")]
    return sorted({name for source in sources for name in re.findall(r"def tf__(\w+)", source)})


# -- optimizers of TensorFlow 1 ---------------------------------------------------------------------------------------


def first_optimizers() -> None:
    tf, hvd, _ = _modules()
    v1 = tf.compat.v1
    factor, mean = hvd.rank() + 1, (hvd.size() + 1) / 2

    def trained(steps: int, **options: Any) -> Any:
        with tf.Graph().as_default():
            variable = v1.get_variable("w", initializer=1.0)
            plain = v1.train.GradientDescentOptimizer(0.1)
            operation = hvd.DistributedOptimizer(plain, **options).minimize(variable * variable * factor)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                found = []
                for _ in range(steps):
                    session.run(operation)
                    found.append(float(session.run(variable)))
        return found

    step = 1 - 0.1 * 2 * mean
    np.testing.assert_allclose(trained(2), [step, step * step], rtol=1e-6)
    accumulated = trained(3, backward_passes_per_step=2)
    np.testing.assert_allclose(accumulated, [1, 1 - 2 * (1 - step), 1 - 2 * (1 - step)], rtol=1e-6)
    averaged = trained(2, backward_passes_per_step=2, average_aggregated_gradients=True)
    np.testing.assert_allclose(averaged, [1, step], rtol=1e-6)
    # The Adasum of two parallel steps a and 2 a is 1.5 a.
    np.testing.assert_allclose(trained(1, op=hvd.Adasum), [1 - 0.2 * 1.5], rtol=1e-5)
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    own = trained(1, op=hvd.Adasum, process_set=alone[hvd.rank()])
    np.testing.assert_allclose(own, [1 - 0.2 * factor], rtol=1e-5)
    for each in alone:
        hvd.remove_process_set(each)
    with pytest.raises(ValueError, match="takes an optimizer"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(InvalidRequestError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)))


def gradients_of_some_passes() -> None:
    """Check that a variable that has no gradient in some passes of a step moves by those of the others."""
    tf, hvd, _ = _modules()
    mean = (hvd.size() + 1) / 2

    def reduced(gradients: Any, variables: Any) -> Any:
        return hvd.grouped_allreduce(gradients, op=hvd.Average, name="sums")

    for compiled in (False, True):
        helper = hvd.LocalGradientAggregationHelper(2, reduced, False, False, 0, None)
        v = [tf.Variable(0.0) for _ in range(4)]

        def step(gradients: Any, helper: Any = helper, v: Any = v) -> Any:
            found = helper.compute_gradients(gradients, v)
            assert found[3] is None

            def apply() -> None:
                for each, gradient in zip(v, found, strict=True):
                    if gradient is not None:
                        each.assign_add(gradient)

            return helper.apply_gradients(apply, None)

        call = tf.function(step) if compiled else step
        own = tf.constant(float(hvd.rank() + 1))
        for _ in range(2):
            call([own, own, None, None])
            call([own, None, own, None])
        assert [float(each) for each in v] == [4 * mean, 2 * mean, 2 * mean, 0.0]


def steps_that_are_given_up() -> None:
    """Check that where the ranks can't reduce in a step's last pass, the next pass begins a step of its own."""
    tf, hvd, _ = _modules()
    fails = tf.Variable(False)

    def reduced(gradients: Any, variables: Any) -> Any:
        found = []
        for gradient in gradients:
            # Ranks that take part with other shapes get an error.
            odd = tf.cond(tf.logical_and(fails, hvd.rank() == 1), lambda: 2, lambda: 1)
            found.append(hvd.allreduce(tf.fill([odd], gradient), op=hvd.Sum, name="sum")[0])
        return found

    for compiled in (False, True):
        helper = hvd.LocalGradientAggregationHelper(2, reduced, False, False, 0, None)
        v = tf.Variable(1.0)

        def step(gradient: Any, helper: Any = helper, v: Any = v) -> Any:
            (found,) = helper.compute_gradients([gradient], [v])
            return helper.apply_gradients(lambda: v.assign_sub(found), None)

        call = tf.function(step) if compiled else step
        call(tf.constant(1.0))
        fails.assign(True)
        with pytest.raises(MismatchError):
            call(tf.constant(10.0))
        fails.assign(False)
        call(tf.constant(100.0))
        assert float(v) == 1
        call(tf.constant(1000.0))
        assert float(v) == 1 - hvd.size() * 1100
        assert int(helper.counter) == 0

    optimizer = hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum, backward_passes_per_step=2
    )
    w = tf.Variable([1.0])
    gradient = tf.ones(1)
    optimizer.apply_gradients([(gradient, w)])
    if hvd.rank() == 1:
        with pytest.raises(MismatchError):
            hvd.allreduce(tf.ones(3), op=hvd.Sum, name="DistributedAdasum.0")
        w.assign_sub(gradient)
    else:
        with pytest.raises(MismatchError):
            optimizer.apply_gradients([(gradient, w)])
    if hvd.rank() == 1:
        optimizer._counter.assign(2)  # as it is where the step itself has failed
    np.testing.assert_array_equal(w, [-1.0])
    for _ in range(2):
        optimizer.apply_gradients([(gradient, w)])
    assert int(optimizer._counter) == 0
    np.testing.assert_allclose(w, [-3.0])  # the Adasum of equal steps is one of them


def failed_adasum_leaves_own_steps() -> None:
    """Check that no variable has a combined value where the ranks could not combine the step of a later one."""
    tf, hvd, _ = _modules()
    own = hvd.rank() + 1.0
    for compiled in (False, True):
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
        w = [tf.Variable([1.0]), tf.Variable(tf.ones(1 + hvd.rank()))]

        def step(optimizer: Any = optimizer, w: Any = w) -> Any:
            return optimizer.apply_gradients([(tf.fill(each.shape, own), each) for each in w])

        with pytest.raises(MismatchError):
            (tf.function(step) if compiled else step)()
        for each in w:
            np.testing.assert_array_equal(each, np.full(each.shape, 1 - own))


# -- Keras ------------------------------------------------------------------------------------------------------------


def _data(hvd: Any) -> tuple[Any, Any]:
    x = np.random.default_rng(hvd.rank()).normal(size=(64, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def _model(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])


def _fit(keras: Any, optimizer: Any, epochs: int = 3, **options: Any) -> Any:
    """Train; the ranks begin with different weights and must end with the same."""
    _, hvd, hvd_keras = _modules()
    model = _model(keras)
    model.compile(optimizer=optimizer, loss="mse", **options)
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
    ]
    x, y = _data(hvd)
    history = model.fit(x, y, epochs=epochs, batch_size=16, verbose=0, callbacks=callbacks).history["loss"]
    sums = hvd.allgather_object([float(np.sum(np.abs(weights))) for weights in model.get_weights()])
    assert sums == [sums[0]] * hvd.size()
    assert hvd.allgather_object(history) == [history] * hvd.size()
    assert history[-1] < history[0]
    return model


def _keras(version: int) -> Any:
    import importlib

    return importlib.import_module("keras" if version == 3 else "tf_keras")


def fits(version: int) -> None:
    keras, (_, hvd, hvd_keras) = _keras(version), _modules()
    optimizers = keras.optimizers
    _fit(keras, hvd_keras.DistributedOptimizer(optimizers.SGD(0.05, momentum=0.9)))
    _fit(keras, hvd.DistributedOptimizer(optimizers.Adam(0.05), compression=hvd.Compression.fp16))
    _fit(keras, hvd_keras.DistributedOptimizer(optimizers.SGD(0.05), backward_passes_per_step=2))
    _fit(keras, hvd_keras.DistributedOptimizer(optimizers.SGD(0.05), groups=2), run_eagerly=True)
    if version == 2:
        _fit(keras, hvd_keras.DistributedOptimizer(optimizers.legacy.Adam(0.05)))
    with pytest.raises(InvalidRequestError, match="distributed already"):
        hvd_keras.DistributedOptimizer(hvd_keras.DistributedOptimizer(optimizers.SGD()))
    with pytest.raises(NotImplementedError, match="can't use Adasum"):
        hvd_keras.DistributedOptimizer(optimizers.SGD(), op=hvd.Adasum)


def _slopes(tf: Any, weights: list[Any], x: Any, y: Any) -> list[Any]:
    """Return the gradients of the mean squared error of two dense layers."""
    variables = [tf.Variable(each) for each in weights]
    first, shift, second, end = variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(((x @ first + shift) @ second + end - y) ** 2)
    return [np.array(each) for each in tape.gradient(loss, variables)]


def partial_optimizers(version: int) -> None:
    """Check that the first layer's gradients stay on their rank, divided by the number of ranks or not; in ``fit`` and
    in a loop."""
    keras, (tf, hvd, hvd_keras) = _keras(version), _modules()
    import hvdlab.keras as plain

    rank, size = hvd.rank(), hvd.size()
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    y = x[:, :2]
    layers = keras.layers
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2), layers.Dense(2)])
    start = hvd.broadcast_object([np.array(each) for each in model.get_weights()], 0)
    slopes = [_slopes(tf, start, x * (r + 1), y) for r in range(size)]
    cases: list[tuple[dict[str, Any], float, float]] = [
        ({}, 1 / size, 1 / size),
        ({"scale_local_gradients": False}, 1, 1 / size),
        ({"op": hvd.Sum}, 1 / size, 1),
        ({"groups": 2}, 1 / size, 1 / size),
        ({"backward_passes_per_step": 2}, 2 / size, 2 / size),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 1 / size, 1 / size),
    ]
    for options, local, shared in cases:
        module = plain if "groups" in options else hvd_keras
        model.set_weights(start)
        optimizer = module.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=model.layers[0], **options
        )
        model.compile(optimizer, loss="mse")
        for _ in range(options.get("backward_passes_per_step", 1)):
            model.train_on_batch(x * (rank + 1), y)
        for i, after in enumerate(model.get_weights()):
            slope = slopes[rank][i] * local if i < 2 else sum(each[i] for each in slopes) * shared
            expected = start[i] - 0.1 * slope
            np.testing.assert_allclose(after, expected, atol=1e-5, err_msg=f"{options} {i}")


def passes(version: int) -> None:
    """Check that, with two passes in a step, gradients are reduced and applied only in the second."""
    keras, (tf, hvd, hvd_keras) = _keras(version), _modules()
    variable = keras.Variable(1.0) if version == 3 else tf.Variable(1.0)
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    step = tf.function(lambda g: optimizer.apply_gradients([(g, variable)]), autograph=False)
    found = []
    for number in range(4):
        step(tf.constant(float(hvd.rank() + 1 + number)))
        found.append(round(float(tf.convert_to_tensor(variable)), 5))
    first = 1 - 0.1 * float(np.mean([r + 1.5 for r in range(hvd.size())]))
    second = first - 0.1 * float(np.mean([r + 3.5 for r in range(hvd.size())]))
    np.testing.assert_allclose(found, [1, first, first, second], rtol=1e-5)
    assert int(tf.convert_to_tensor(optimizer.iterations)) == 4


def clones(version: int) -> None:
    """Check that an optimizer that is made from a distributed one's class and settings is distributed, too."""
    keras, (tf, hvd, hvd_keras) = _keras(version), _modules()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    clone = type(optimizer).from_config(optimizer.get_config())
    variable = keras.Variable(1.0) if version == 3 else tf.Variable(1.0)
    clone.apply_gradients([(tf.constant(float(hvd.rank())), variable)])
    expected = 1 - 0.1 * (hvd.size() - 1) / 2
    np.testing.assert_allclose(float(tf.convert_to_tensor(variable)), expected, rtol=1e-6)


def pickled(version: int) -> None:
    """Check that a model that is sent to another rank trains with the other ranks there, as it would have on its own
    rank."""
    keras, (_, hvd, hvd_keras) = _keras(version), _modules()
    random = np.random.default_rng(hvd.rank())
    x, y = random.normal(size=(32, 4)).astype(np.float32), random.normal(size=(32, 1)).astype(np.float32)
    for policy in ("float32", "mixed_float16"):
        keras.mixed_precision.set_global_policy(policy)
        try:
            model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1, name="own")])
            model.build((None, 4))
        finally:
            keras.mixed_precision.set_global_policy("float32")
        groups = [model.layers[0].trainable_variables, [model.layers[1].kernel]]
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.Adam(0.01), groups=groups, compression=hvd.Compression.fp16
        )
        optimizer.register_local_var(model.layers[1].bias)
        model.compile(optimizer, loss="mse")
        broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[broadcast])
        received = hvd.broadcast_object(model, 0)
        if hvd.rank() == 0:
            received = model  # the other ranks train with the copies that they got
        before = [np.array(each) for each in received.get_weights()]
        received.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        every = hvd.allgather_object(received.get_weights())
        for mine, theirs in zip(every[0][:3], every[1][:3], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=policy)
        assert (every[0][3] != every[1][3]).all()  # the gradients of this variable are local
        assert all((mine != each).any() for mine, each in zip(before, received.get_weights(), strict=True))


def computed_gradients() -> None:
    """Check in Keras 2 that gradients are reduced when they are computed, and only once."""
    keras, (tf, hvd, _) = _keras(2), _modules()
    start, slope = np.array([1.0, 2.0]), np.array([2.0, 4.0]) * (hvd.size() + 1) / 2
    variable = tf.Variable(start)

    def loss() -> Any:
        return tf.reduce_sum(variable * variable) * (hvd.rank() + 1)

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    with tf.GradientTape() as tape:
        value = loss()
    pairs = optimizer.compute_gradients(value, [variable], tape=tape)
    np.testing.assert_allclose(pairs[0][0], slope * hvd.size())
    optimizer.apply_gradients(pairs)
    np.testing.assert_allclose(variable, start - 0.1 * slope * hvd.size())
    plain = keras.optimizers
    for kind in (
        hvd.DistributedOptimizer(plain.SGD(0.1)),
        hvd.DistributedOptimizer(plain.legacy.SGD(0.1)),
        keras.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(plain.SGD(0.1))),
    ):
        variable.assign(start)
        kind.minimize(loss, [variable])
        np.testing.assert_allclose(variable, start - 0.1 * slope, rtol=1e-6)


def fits_are_recorded(version: int) -> None:
    keras, (tf, hvd, hvd_keras) = _keras(version), _modules()
    x, y = _data(hvd)
    model = _model(keras)

    def points(**options: Any) -> dict[str, list[tuple[Any, float]]]:
        given = {} if "x" in options else {"x": x, "y": y, "batch_size": 16}
        model.fit(verbose=0, **given, **options)
        return recorded()

    with recorded_points() as recorded:
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
        averaged = [hvd_keras.callbacks.MetricAverageCallback()]
        found = points(epochs=2, validation_data=(x, y), callbacks=averaged)
        assert [step for step, _ in found["step_time"]] == [2, 3, 4, 6, 7, 8]
        assert all(0 < seconds < 60 for _, seconds in found["step_time"])
        assert all(rate > 0 for _, rate in found["samples_per_second"])
        pairs = zip(found["samples_per_second"], found["step_time"], strict=True)
        assert all(rate * seconds == pytest.approx(16) for (_, rate), (_, seconds) in pairs)
        assert [step for step, _ in found["learning_rate"]] == list(range(1, 9))
        assert [rate for _, rate in found["learning_rate"]] == pytest.approx([0.01] * 8)
        measured = {"step_time", "samples_per_second", "learning_rate"}
        assert found.keys() - measured == {"loss", "mae", "val_loss", "val_mae"}
        assert [step for step, _ in found["loss"]] == list(range(1, 9))
        assert [step for step, _ in found["val_loss"]] == [4, 8]
        # This rank's own metrics, though a callback behind the recording one averages them.
        (_, last) = found["val_loss"][-1]
        assert last == pytest.approx(model.evaluate(x, y, verbose=0)[0], rel=1e-4)
        assert len(set(hvd.allgather_object(last))) == hvd.size()
        # Several steps are executed together, the last time fewer.
        model.compile(optimizer=model.optimizer, loss="mse", steps_per_execution=3)
        steps = [step for step, _ in points(epochs=1)["loss"]]
        assert steps[-1] == 12
        # A dataset that is batched already, and a schedule, whose rate is recorded once in an epoch.
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).prefetch(1)
        falling = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
        model.compile(optimizer=hvd_keras.DistributedOptimizer(keras.optimizers.SGD(falling)), loss="mse")
        found = points(x=batches, epochs=2)
        (_, rate), (_, seconds) = found["samples_per_second"][0], found["step_time"][0]
        assert rate * seconds == pytest.approx(32)
        behind = (
            0 if version == 3 else 0.5
        )  # Keras 3 has the next step's rate by then, Keras 2 the last one's
        expected = [0.01 * 0.5 ** (epoch - behind) for epoch in (1, 2)]
        assert [rate for _, rate in found["learning_rate"]] == pytest.approx(expected)
        # Nothing is recorded for a model that is not distributed.
        model.compile(optimizer="sgd", loss="mse")
        assert "loss" not in points(epochs=1)


def saves(version: int) -> None:
    keras, (_, hvd, hvd_keras) = _keras(version), _modules()
    import hvdlab.keras
    from hvdlab.tensorflow.keras.optimizers import Distributed, load_model

    model = _fit(keras, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    path = os.path.join(os.environ["HVDLAB_TEST_FOLDER"], f"{version}-{hvd.rank()}.keras")
    model.save(path)
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.Adam  # as without hvdlab
    load = (
        hvd_keras.load_model
        if version == 3
        else lambda path: load_model(keras, path, None, None, hvd.Compression.none)
    )
    again = load(path)
    assert isinstance(again.optimizer, Distributed)
    assert isinstance(again.optimizer, keras.optimizers.Adam)
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations) > 0
    x, y = _data(hvd)
    again.fit(x, y, epochs=1, verbose=0)
    sums = hvd.allgather_object([float(np.sum(np.abs(weights))) for weights in again.get_weights()])
    assert sums == [sums[0]] * hvd.size()
    if version == 3:
        assert isinstance(hvdlab.keras.load_model(path).optimizer, Distributed)


def mixed_precision() -> None:
    """Check that if one rank's gradients overflow, all ranks skip the step: no rank waits for another."""
    keras, (_, hvd, hvd_keras) = _keras(3), _modules()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = _fit(keras, hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)))
        x, y = _data(hvd)
        before = model.get_weights()
        if hvd.rank() == 1:
            y = y * np.inf
        model.fit(x[:16], y[:16], epochs=1, batch_size=16, verbose=0)
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def rates(version: int) -> None:
    keras, (_, hvd, hvd_keras) = _keras(version), _modules()
    callbacks, x, y = hvd_keras.callbacks, *_data(hvd)

    def trained(callback: Any, epochs: int) -> list[float]:
        model = _model(keras)
        model.compile(optimizer=hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        history = model.fit(x, y, epochs=epochs, batch_size=16, verbose=0, callbacks=[callback])
        return [float(rate) for rate in history.history["lr"]]

    halved = callbacks.LearningRateScheduleCallback(0.01, lambda epoch: 0.5**epoch, start_epoch=1)
    np.testing.assert_allclose(trained(halved, 3), [0.01, 0.005, 0.0025], rtol=1e-5)
    decayed = callbacks.LearningRateScheduleCallback(0.01, 0.1, start_epoch=1, end_epoch=4)
    np.testing.assert_allclose(trained(decayed, 5), [0.01, 0.01, 0.001, 0.0001, 0.0001], rtol=1e-5)
    smooth = callbacks.LearningRateScheduleCallback(0.01, 0.1, staircase=False, steps_per_epoch=4)
    np.testing.assert_allclose(trained(smooth, 1), [0.01 * 0.1**0.75], rtol=1e-5)
    n = hvd.size()
    warm = callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2)
    np.testing.assert_allclose(trained(warm, 3), [0.01 / n * ((n - 1) / 2 + 1), 0.01, 0.01], rtol=1e-5)


def momenta(version: int) -> None:
    """Check the momentum during and after each batch; the rate halves with the second epoch."""
    keras, (_, hvd, hvd_keras) = _keras(version), _modules()
    x, y = _data(hvd)

    def trained(*, run_eagerly: bool, interrupted: bool = False) -> list[float]:
        found: list[float] = []
        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch)

        class Recorder(hvd_keras.callbacks.Callback):  # type: ignore[misc,name-defined,unused-ignore]
            def on_batch_begin(self, batch: int, logs: Any = None) -> None:
                found.append(self.model.optimizer.momentum)
                if interrupted and len(found) == 5:
                    raise KeyboardInterrupt

            def on_batch_end(self, batch: int, logs: Any = None) -> None:
                found.append(self.model.optimizer.momentum)

        model = _model(keras)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse", run_eagerly=run_eagerly)
        options: dict[str, Any] = {"batch_size": 32, "verbose": 0, "callbacks": [schedule, Recorder()]}
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                model.fit(x, y, epochs=2, **options)
            found.clear()
            interrupted = False
            model.fit(x, y, epochs=1, initial_epoch=0, **options)
        else:
            model.fit(x, y, epochs=2, **options)
        return found

    assert trained(run_eagerly=True) == [0.5] * 4 + [0.25, 0.5, 0.5, 0.5]
    # The rate doubles again in the first batch of the second fit.
    assert trained(run_eagerly=True, interrupted=True) == [1.0, 0.5, 0.5, 0.5]
    with pytest.warns(RuntimeWarning, match="momentum_correction= does nothing"):
        assert trained(run_eagerly=False) == [0.5] * 8


def best_models() -> None:
    keras, (_, hvd, hvd_keras) = _keras(3), _modules()
    x, y = _data(hvd)
    model = _model(keras)
    model.compile(optimizer="sgd", loss="mse")
    callback = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(InvalidRequestError, match="filepath"):
        model.fit(x, y, epochs=1, verbose=0, callbacks=[callback])
    callback.filepath = os.path.join(os.environ["HVDLAB_TEST_FOLDER"], f"best-{hvd.rank()}.keras")
    model.fit(x, y, epochs=1, verbose=0, callbacks=[callback])
    assert os.path.exists(callback.filepath)


def names_that_packages_replace() -> None:
    """Check that every reduction of a Keras optimizer goes through ``_allreduce`` and ``_allreduce_grads``, which
    packages replace."""
    tf, hvd, hvd_keras = _modules()
    import tf_keras  # type: ignore[import-untyped]  # has no types

    mean = (hvd.size() + 1) / 2
    made: list[Callable[[], Any]] = [
        lambda: tf.keras.optimizers.SGD(1.0),
        lambda: tf_keras.optimizers.SGD(1.0),
        lambda: tf_keras.optimizers.legacy.SGD(1.0),
    ]
    for passes in (1, 2):
        for make in made:
            optimizer = hvd_keras.DistributedOptimizer(make(), backward_passes_per_step=passes)
            assert isinstance(optimizer._agg_helper, hvd.LocalGradientAggregationHelper) == (passes == 2)
            v = tf.Variable([0.0])
            calls: list[str] = []
            before, reduce = optimizer._allreduce, optimizer._allreduce_grads

            def outer(grads: Any, vars: Any, before: Any = before, calls: list[str] = calls) -> Any:
                calls.append("outer")
                return before(grads, vars)

            def inner(grads: Any, vars: Any, reduce: Any = reduce, calls: list[str] = calls) -> Any:
                calls.append("inner")
                return [10 * each for each in reduce(grads, vars)]

            optimizer._allreduce, optimizer._allreduce_grads = outer, inner
            for _ in range(passes):
                optimizer.apply_gradients([(tf.constant([hvd.rank() + 1.0]), v)])
            assert v.numpy().tolist() == [-10 * passes * mean]
            assert calls == [["outer", "inner"], ["outer", "outer", "inner"]][passes - 1]


def gradients_of_legacy_optimizers() -> None:
    """Check that they are reduced where they are computed, once."""
    tf, hvd, hvd_keras = _modules()
    import tf_keras

    mean = (hvd.size() + 1) / 2
    optimizer = hvd_keras.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(1.0))
    v = tf.Variable([0.0])
    for total in (1, 2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * (hvd.rank() + 1.0))
        pairs = optimizer._compute_gradients(loss, [v], tape=tape)
        assert [gradient.numpy().tolist() for gradient, _ in pairs] == [[mean]]
        optimizer.apply_gradients([(10 * gradient, each) for gradient, each in pairs])
        assert v.numpy().tolist() == [-10 * total * mean]
    with tf.Graph().as_default():
        w = tf.Variable([1.0])
        (gradient,) = optimizer.get_gradients(tf.reduce_sum(w * (hvd.rank() + 1.0)), [w])
        optimizer._hvdlab_set(computed=False)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(gradient).tolist() == [mean]


def gradients_of_tapes_divided() -> None:
    tf, hvd, _ = _modules()
    v, w, x = tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    assert tape.get_local_and_global_gradients([1, 2], [v, w]) == ([], [(1, v), (2, w)])
    tape.register_local_source(w)
    local, shared = tape.get_local_and_global_gradients([1, None, 3], [v, w, x])
    assert [(gradient, each.ref()) for gradient, each in local] == [(None, w.ref())]
    assert [(gradient, each.ref()) for gradient, each in shared] == [(1, v.ref()), (3, x.ref())]


def values() -> None:
    tf, hvd, hvd_keras = _modules()
    import hvdlab.keras as plain

    mean = (hvd.size() - 1) / 2
    found = {
        "allreduce": (hvd_keras.allreduce(float(hvd.rank())), mean),
        "plain": (plain.allreduce(float(hvd.rank())), mean),
        "sum": (plain.allreduce(1.0, average=False), hvd.size()),
        "allgather": (hvd_keras.allgather([hvd.rank()]), list(range(hvd.size()))),
        "broadcast": (hvd_keras.broadcast(np.array([hvd.rank()]), 1), [1]),
        "reducescatter": (hvd_keras.reducescatter(np.ones(hvd.size()), op=hvd.Sum), [hvd.size()]),
    }
    for name, (value, expected) in found.items():
        assert isinstance(value, tf.Tensor), name
        assert value.numpy().tolist() == expected, name


# -- layers -----------------------------------------------------------------------------------------------------------


def _plain_normalization(tf: Any) -> Any:
    """Keras' own layer; for Keras 2 without its fused kernel, which alone corrects the moving variance."""
    kind = tf.keras.layers.BatchNormalization
    return kind(fused=False) if hasattr(kind, "_fused_can_be_used") else kind()


def normalization() -> None:
    """As one batch of all ranks is normalized; also for pictures, for which Keras 2 has a fused kernel."""
    tf, hvd, _ = _modules()
    rank, size = hvd.rank(), hvd.size()
    own = slice(8 * rank, 8 * rank + 8)
    for shape in ((5, 3), (3,), (4, 4, 3)):
        every = [
            np.random.default_rng(r).normal(r, 1 + r, (8, *shape)).astype(np.float32) for r in range(size)
        ]
        whole = tf.constant(np.concatenate(every))
        synchronized, plain = hvd.SyncBatchNormalization(), _plain_normalization(tf)
        with tf.GradientTape() as tape:
            mine = tf.constant(every[rank])
            tape.watch(mine)
            output = synchronized(mine, training=True)
            loss = tf.reduce_sum(output**3)
        with tf.GradientTape() as reference:
            reference.watch(whole)
            expected = plain(whole, training=True)
            total = tf.reduce_sum(expected**3)
        np.testing.assert_allclose(output, expected[own], atol=2e-5, err_msg=str(shape))
        slopes = tape.gradient(loss, mine), reference.gradient(total, whole)[own]
        np.testing.assert_allclose(*slopes, atol=2e-3, err_msg=str(shape))
        np.testing.assert_allclose(synchronized.moving_variance, plain.moving_variance, rtol=1e-5)
        np.testing.assert_allclose(synchronized(mine), plain(whole)[own], atol=1e-5)
        again = type(synchronized).from_config(synchronized.get_config())
        assert again(mine, training=True).shape == mine.shape
    with pytest.raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)


def far_from_zero() -> None:
    """Check that a variance that is small beside the mean is not lost in rounding."""
    tf, hvd, _ = _modules()
    every = [
        np.random.default_rng(r).normal(3000 + r, 0.5, (64, 3)).astype(np.float32) for r in range(hvd.size())
    ]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(tf.constant(every[hvd.rank()]), training=True)
    expected = np.concatenate(every).astype(np.float64).var(0)
    np.testing.assert_allclose(layer.moving_variance, expected, rtol=1e-3)


def masked_normalization() -> None:
    """Check that elements that a mask leaves out do not count on any rank; also in half precision."""
    tf, hvd, _ = _modules()
    keras = tf.keras
    rank, size = hvd.rank(), hvd.size()
    every = [np.random.default_rng(r).normal(r, 1 + r, (8, 5, 3)).astype(np.float32) for r in range(size)]
    masks = [np.random.default_rng(9 + r).random((8, 5)) < 0.3 + 0.4 * r for r in range(size)]
    own = slice(8 * rank, 8 * rank + 8)
    for policy, near in (("float32", 1e-4), ("mixed_float16", 0.05), ("mixed_bfloat16", 0.3)):
        keras.mixed_precision.set_global_policy(policy)
        try:
            synchronized, plain = hvd.SyncBatchNormalization(), _plain_normalization(tf)
        finally:
            keras.mixed_precision.set_global_policy("float32")

        def slope(layer: Any, x: Any, mask: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = layer(x, training=True, mask=tf.constant(mask))
                loss = tf.reduce_sum(tf.cast(output, tf.float32) ** 3)
            return output, tape.gradient(loss, x)

        output, mine = slope(synchronized, tf.constant(every[rank]), masks[rank])
        whole, others = slope(plain, tf.constant(np.concatenate(every)), np.concatenate(masks))
        assert output.dtype == whole.dtype
        np.testing.assert_allclose(
            tf.cast(output, tf.float32), tf.cast(whole[own], tf.float32), atol=near, err_msg=policy
        )
        np.testing.assert_allclose(mine, others[own], atol=10 * near, err_msg=policy)
        np.testing.assert_allclose(synchronized.moving_variance, plain.moving_variance, rtol=1e-3)
    nothing = hvd.SyncBatchNormalization()(tf.ones((2, 2, 1)), training=True, mask=tf.zeros((2, 2), tf.bool))
    assert bool(tf.reduce_all(tf.math.is_finite(nothing)))


# -- elastic states ---------------------------------------------------------------------------------------------------


def states() -> None:
    tf, hvd, hvd_keras = _modules()
    keras = _keras(3)
    variable = tf.Variable(float(hvd.rank()))
    state = hvd.elastic.TensorFlowState([variable], epoch=hvd.rank())
    state.sync()
    assert (float(variable), state.epoch) == (0.0, 0)
    variable.assign(5.0)
    state.epoch = 3
    state.commit()
    variable.assign(7.0)
    state.epoch = 4
    state.restore()
    assert (float(variable), state.epoch) == (5.0, 3)
    model = _model(keras)
    model.compile(
        optimizer=hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), loss="mse"
    )
    x, y = _data(hvd)
    model.fit(x, y, epochs=1, verbose=0)
    saved = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)
    assert saved.model is model
    saved.sync()
    weights = model.get_weights()
    assert len(set(hvd.allgather_object(str(weights)))) == 1
    callbacks = [
        hvd_keras.elastic.CommitStateCallback(saved, batches_per_commit=2),
        hvd_keras.elastic.UpdateBatchStateCallback(saved),
        hvd_keras.elastic.UpdateEpochStateCallback(saved),
    ]
    model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks)
    assert (saved.epoch, saved.batch) == (2, 0)
    kept = model.get_weights()
    saved.save()
    model.fit(x, y, epochs=1, verbose=0)
    saved.restore()
    for one, other in zip(kept, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def late_variables(version: int) -> None:
    """A rank has not trained yet, and so has no momentum: after the synchronization all ranks have rank 0's, and train alike."""
    keras, (_, hvd, hvd_keras) = _keras(version), _modules()
    x, y = (np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))
    makers: list[Callable[[], Any]] = [lambda: keras.optimizers.SGD(0.1, momentum=0.9)]
    makers.append(lambda: keras.mixed_precision.LossScaleOptimizer(makers[0]()))
    if version == 2:
        makers.append(lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9))
    for make in makers:
        for trained in (0, 1):
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
            model.compile(make(), loss="mse")
            if hvd.rank() == trained:
                model.fit(x, y, verbose=0)
            state = hvd_keras.elastic.KerasState(model, epoch=hvd.rank())
            state.sync()
            assert state.epoch == 0
            momentum = [
                np.abs(np.array(each)).max() for each in _variables(model.optimizer) if len(each.shape)
            ]
            assert len(momentum) == 2  # of the kernel and of the bias
            assert all(each > 0 for each in momentum) == (trained == 0)
            model.fit(x, y, verbose=0)
            every = hvd.allgather_object(
                [np.array(each).tolist() for each in [*model.get_weights(), *_variables(model.optimizer)]]
            )
            assert every == [every[0]] * hvd.size()


def untrained(version: int) -> None:
    """Check that a state that is restored to before the first step has no momentum of the steps after it."""
    keras, (_, _, hvd_keras) = _keras(version), _modules()
    makers = [keras.optimizers.SGD, keras.optimizers.legacy.SGD] if version == 2 else [keras.optimizers.SGD]
    for make in makers:
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(make(0.1, momentum=0.9), loss="mse")
        state = hvd_keras.elastic.KerasState(model, epoch=0)
        state.sync()
        model.fit(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), verbose=0)
        state.restore()
        momentum = [np.array(each) for each in _variables(model.optimizer) if len(each.shape)]
        assert len(momentum) == 2
        assert not any(each.any() for each in momentum)


def _variables(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def variables_differ() -> None:
    tf, hvd, _ = _modules()
    with pytest.raises(MismatchError, match="the ranks disagree"):
        hvd.broadcast_variables([tf.Variable(tf.ones(2 + hvd.rank())), tf.Variable(1.0)], 0)
    with pytest.raises(hvd.HorovodInternalError, match="in group `broadcast_variables` of 1"):
        hvd.broadcast_variables([tf.Variable(1.0)] + [tf.Variable(2.0)] * hvd.rank(), 0)
    hvd.broadcast_variables([tf.Variable(1.0)], 0)


def compiled() -> None:
    """Check that compile() refuses XLA before anything is traced, and Keras does not choose XLA by itself."""
    _, _, hvd_keras = _modules()
    for version in (3, 2):
        keras = _keras(version)
        model = _model(keras)
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01))
        for given in (optimizer, keras.mixed_precision.LossScaleOptimizer(optimizer)):
            with pytest.raises(UnsupportedError, match=r"model\.compile\(\.\.\., jit_compile=False\)"):
                model.compile(optimizer=given, loss="mse", jit_compile=True)
        model.compile(optimizer=optimizer, loss="mse")
        assert not model.jit_compile
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model.compile(optimizer=optimizer, loss="mse", experimental_run_tf_function=False)
        said = [str(one.message) for one in warned if "experimental_run_tf_function" in str(one.message)]
        assert len(said) == (version == 3)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        model.compile(optimizer="sgd", loss="mse", jit_compile=True)  # not distributed
        assert model.jit_compile


def test_only_the_users_functions_are_rewritten(two: Ranks) -> None:
    assert two.run(rewritten) == [["step"]] * 2


@pytest.mark.parametrize(
    "function",
    [tapes, partial_tapes, tapes_of_one_recording, first_optimizers, names_that_packages_replace, gradients_of_legacy_optimizers, gradients_of_tapes_divided, values, normalization, masked_normalization, far_from_zero, gradients_of_some_passes, states, variables_differ, steps_that_are_given_up, failed_adasum_leaves_own_steps, computed_gradients, compiled, mixed_precision, best_models],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_training(two: Ranks, function: Callable[[], None]) -> None:
    two.run(function, timeout=100)


@pytest.mark.parametrize("function", [tapes, partial_tapes], ids=lambda function: function.__name__)
def test_tapes_in_other_worlds(others: Ranks, function: Callable[[], None]) -> None:
    others.run(function, timeout=100)


@pytest.mark.parametrize("version", [3, 2])
def test_partial_optimizers_in_other_worlds(others: Ranks, version: int) -> None:
    others.run(partial_optimizers, version, timeout=100)


@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize(
    "function",
    [
        fits,
        passes,
        partial_optimizers,
        clones,
        pickled,
        fits_are_recorded,
        saves,
        rates,
        momenta,
        late_variables,
        untrained,
    ],
    ids=lambda function: function.__name__,
)
def test_keras(two: Ranks, function: Callable[[int], None], version: int) -> None:
    two.run(function, version, timeout=100)


def test_normalization_where_keras_2_is_chosen() -> None:
    """The first use of ``tf.keras`` decides which Keras it is, so these ranks are forked without TensorFlow."""
    with Ranks(2, env={"TF_USE_LEGACY_KERAS": "1"}) as ranks:
        for function in (normalization, masked_normalization):
            ranks.run(function, timeout=100)

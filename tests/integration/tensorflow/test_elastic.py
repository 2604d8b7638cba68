"""Elastic training with each of the states: a rank is killed, the other goes on, and both train when the rank is back."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab.bindings.elastic_sampler import first_rank
from hvdlab.collectives import context
from support.patience import PATIENCE
from support.ranks.resident import RankGone, Ranks

BATCHES, EPOCHS = 6, 2


class Disturbed:
    """Dies, or waits for a newcomer, after a given number of this process's steps."""

    def __init__(self, dies_after: int, waits_after: int, door: str) -> None:
        self._dies_after, self._waits_after, self._door = dies_after, waits_after, door
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps == self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._steps == self._waits_after:
            self._wait_for_newcomer()

    def _wait_for_newcomer(self) -> None:
        """Write to the door's file that a rank may come, and return once it waits to be let in: the next commit lets it in."""
        assert first_rank() == context.engine().rank
        Path(self._door).write_text("come")
        arrived = threading.Event()
        regrouping = context.engine().elastic
        stop = regrouping.watch(lambda waiting, leaving: arrived.set() if waiting else None)
        assert regrouping.waiting or arrived.wait(PATIENCE)
        stop()


def _data() -> tuple[Any, Any]:
    x = np.random.default_rng(7).normal(size=(4 * BATCHES, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def _compiled() -> Any:
    import keras

    import hvdlab.keras as hvd

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, loss="mse", run_eagerly=False)
    return model


def _loop(state: Any, step: Callable[[Any, Any], None], disturbed: Disturbed) -> None:
    x, y = _data()
    while state.epoch < EPOCHS:
        while state.batch < BATCHES:
            rows = slice(4 * state.batch, 4 * state.batch + 4)
            step(x[rows], y[rows])
            disturbed.step()
            state.batch += 1
            state.log = [*state.log, (state.epoch, state.batch)]
            state.commit()
        state.epoch, state.batch = state.epoch + 1, 0


def plain_variables(disturbed: Disturbed, state_of: Callable[..., Any]) -> tuple[Any, Any]:
    """TensorFlowState: variables that the user's own function changes."""
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    weights = tf.Variable(np.random.default_rng(hvd.rank()).normal(size=(3, 1)).astype(np.float32))
    state = state_of(hvd.elastic.TensorFlowState, [weights], epoch=0, batch=0, log=[])

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(x: Any, y: Any) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        weights.assign_sub(0.05 * tape.gradient(loss, weights))

    hvd.elastic.run(lambda state: _loop(state, step, disturbed))(state)
    return state, [weights]


def keras_loop(disturbed: Disturbed, state_of: Callable[..., Any]) -> tuple[Any, Any]:
    """TensorFlowKerasState: a model and its optimizer in a loop."""
    import hvdlab.tensorflow as hvd

    model = _compiled()
    state = state_of(hvd.elastic.TensorFlowKerasState, model, epoch=0, batch=0, log=[])
    hvd.elastic.run(lambda state: _loop(state, model.train_on_batch, disturbed))(state)
    return state, [*model.variables, *model.optimizer.variables]


def keras_fit(disturbed: Disturbed, state_of: Callable[..., Any]) -> tuple[Any, Any]:
    """KerasState: ``fit`` with its callbacks."""
    import keras
    import tensorflow as tf

    import hvdlab.keras as hvd

    model = _compiled()
    state = state_of(hvd.elastic.KerasState, model, epoch=0, batch=0, log=[])
    rows = tf.data.Dataset.from_tensor_slices(_data()).repeat().batch(4)

    class Logged(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            disturbed.step()
            state.log = [*state.log, (state.epoch, len(state.log))]

    @hvd.elastic.run  # type: ignore[untyped-decorator,unused-ignore]
    def train(state: Any) -> None:
        callbacks = [
            Logged(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]
        epochs = EPOCHS - state.epoch
        model.fit(rows, steps_per_epoch=BATCHES, epochs=epochs, callbacks=callbacks, verbose=0)

    train(state)
    return state, [*model.variables, *model.optimizer.variables]


def train(kind: str, dies_after: int, waits_after: int, door: str) -> dict[str, Any]:
    import hvdlab.tensorflow as hvd

    hvd.init()
    sizes: list[int] = []

    def state_of(made: Any, *args: Any, **kwargs: Any) -> Any:
        state = made(*args, **kwargs)
        state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
        return state

    state, variables = globals()[kind](Disturbed(dies_after, waits_after, door), state_of)
    return {
        "values": [np.array(each) for each in variables],
        "log": state.log,
        "epoch": state.epoch,
        "sizes": sizes,
        "size": hvd.size(),
    }


@pytest.mark.parametrize("kind", ["plain_variables", "keras_loop", "keras_fit"])
def test_a_killed_rank_comes_back_and_takes_part_again(kind: str, tmp_path: Path) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    ready = os.open(door, os.O_RDONLY | os.O_NONBLOCK)
    with Ranks(2, imports=["hvdlab.keras"], env={"HOROVOD_ELASTIC_TIMEOUT": "60"}) as ranks:
        stays = ranks.start(train, kind, 0, 6, str(door), ranks=[0])
        lost = ranks.start(train, kind, 3, 0, str(door), ranks=[1])
        assert isinstance(lost.outcomes(PATIENCE)[0], RankGone)
        ranks.processes[1].wait(PATIENCE)
        assert select.select([ready], [], [], PATIENCE)[0]  # the other goes on without it
        os.close(ready)
        ranks.respawn(1)
        back = ranks.start(train, kind, 0, 0, str(door), ranks=[1])
        first, second = stays.results(PATIENCE)[0], back.results(PATIENCE)[0]
    assert (first["sizes"], second["sizes"]) == ([1, 2], [])
    assert first["size"] == second["size"] == 2
    assert first["epoch"] == second["epoch"] == EPOCHS
    assert first["log"] == second["log"]
    assert len(first["log"]) >= BATCHES * EPOCHS
    if kind != "keras_fit":  # fit() starts over with its data
        assert first["log"] == [(e, b + 1) for e in range(EPOCHS) for b in range(BATCHES)]
    for mine, theirs in zip(first["values"], second["values"], strict=True):
        np.testing.assert_array_equal(mine, theirs)

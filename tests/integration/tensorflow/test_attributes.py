"""Attributes set on Horovod's objects for TensorFlow and Keras take effect."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks.resident import Ranks

# -- on the ranks -------------------------------------------------------------------------------------------------


def gradients_of_a_set() -> dict[str, list[float]]:
    """The steps of each kind, over a process set of one rank and then over all."""
    import keras
    import tensorflow as tf

    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine = sets[hvd.rank()]
    rate = keras.optimizers.SGD(1.0)
    made: dict[str, Any] = {
        "keras": hvd_keras.DistributedOptimizer(rate),
        "keras, two passes": hvd_keras.DistributedOptimizer(rate, backward_passes_per_step=2),
        "tensorflow": hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0)),
    }
    found: dict[str, list[float]] = {}
    for name, optimizer in made.items():
        variable = tf.Variable(0.0)
        assert optimizer.process_set is hvd.global_process_set
        found[name] = []
        for process_set in (mine, hvd.global_process_set):
            optimizer.process_set = process_set
            before = float(variable)
            for _ in range(2 if "two" in name else 1):
                if name == "tensorflow":
                    loss = lambda kept=variable: kept * float(hvd.rank() + 1)
                    optimizer.apply_gradients(optimizer.compute_gradients(loss, [variable]))
                else:
                    optimizer.apply_gradients([(tf.constant(float(hvd.rank() + 1)), variable)])
            found[name].append(before - float(variable))
    assert made["keras"].hvdlab_settings["process_set"] is hvd.global_process_set
    found["tape"] = []
    for process_set in (mine, hvd.global_process_set):
        variable = tf.Variable(0.0)
        with tf.GradientTape() as tape:
            loss = variable * float(hvd.rank() + 1)
        tape = hvd.DistributedGradientTape(tape)
        tape.process_set = process_set
        found["tape"].append(float(tape.gradient(loss, variable)))
    for each in sets:
        assert hvd.remove_process_set(each)
    return found


def local_gradients() -> list[float]:
    import keras
    import tensorflow as tf

    import hvdlab.tensorflow.keras as hvd

    found = []
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes)
        variable = tf.Variable(0.0)
        optimizer.register_local_var(variable)
        for optimizer.scale_local_gradients in (True, False):
            before = float(variable)
            for _ in range(passes):
                optimizer.apply_gradients([(tf.constant(2.0), variable)])
            found.append(before - float(variable))
    return found


def states_follow() -> None:
    """Check that a state saves and restores the objects that were assigned to it last."""
    import keras
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    def model(units: int) -> Any:
        made = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(units)])
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    first, second = model(1), model(3)
    state = hvd.elastic.TensorFlowKerasState(first, epoch=1)
    state.model, state.optimizer = second, second.optimizer
    kept = [each.numpy() for each in second.variables]
    for committed in (False, True):  # also before any other save
        if committed:
            second.variables[0].assign(second.variables[0] * 0 + 5.0)
            state.save()
            kept = [each.numpy() for each in second.variables]
        second.set_weights([each * 0 + 9.0 for each in second.get_weights()])
        state.restore()
        assert [each.numpy().tolist() for each in second.variables] == [each.tolist() for each in kept]
    with pytest.raises(ValueError, match="no variables yet"):
        state.model = keras.Sequential([keras.layers.Dense(1)])
    assert state.model is second

    variables = [tf.Variable(1.0)], [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    plain = hvd.elastic.TensorFlowState(variables[0], epoch=1)
    assert plain.session is None
    plain.variables = variables[1]
    for each in variables[1]:
        each.assign(each * 0 + 7.0)
    variables[0][0].assign(8.0)
    plain.restore()
    assert [each.numpy().tolist() for each in variables[1]] == [[1.0, 2.0], 3.0]
    assert float(variables[0][0]) == 8.0
    if hvd.rank() == 0:
        variables[1][1].assign(4.0)
    plain.sync()
    assert float(variables[1][1]) == 4.0


# -- tests ------------------------------------------------------------------------------------------------------------


def test_gradients_are_reduced_over_the_process_set_that_was_set(two: Ranks) -> None:
    for rank, found in enumerate(two.run(gradients_of_a_set, timeout=100)):
        alone = float(rank + 1)
        assert found == {
            "keras": [alone, 1.5],
            "keras, two passes": [2 * alone, 3.0],
            "tensorflow": [alone, 1.5],
            "tape": [alone, 1.5],
        }


def test_local_gradients_are_scaled_as_it_is_set(two: Ranks) -> None:
    assert two.run(local_gradients, timeout=100) == [[1.0, 2.0, 2.0, 4.0]] * 2


def test_a_state_follows_what_is_assigned_to_it(two: Ranks) -> None:
    two.run(states_follow, timeout=100)

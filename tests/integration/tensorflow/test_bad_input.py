"""Calls that can't work raise an error whose one sentence gives the reason, and the next collective works."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from hvdlab.collectives.errors import AbortedError, InvalidRequestError, MismatchError, UnsupportedError
from support.ranks.resident import Ranks


def _cases() -> list[tuple[Callable[[], Any], type[Exception], str]]:
    import keras
    import tensorflow as tf
    import tf_keras  # type: ignore[import-untyped]  # has no types

    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    ones, rank = tf.ones(3), hvd.rank()
    unknown = tf.function(hvd.alltoall, input_signature=[tf.TensorSpec(None, tf.float32)])
    many = [tf.Variable(1.0) for _ in range(1 + rank)]

    def slopes() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n([each * each for each in many])
        return tape.gradient(loss, many)

    twice = "is distributed already: its gradients would be reduced twice"
    jit = "can't be compiled by XLA. Use tf.function without jit_compile=True"
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: hvd.allreduce(tf.constant(["a"])), UnsupportedError, "this tensor is string."),
        (lambda: hvd.allgather(tf.constant([1j])), UnsupportedError, "Send tf.math.real(tensor) and"),
        (lambda: hvd.allreduce(tf.constant([True])), UnsupportedError, "of bool tensors can't average; use"),
        (lambda: hvd.allreduce(tf.ragged.constant([[1.0]])), InvalidRequestError, "not RaggedTensor."),
        (lambda: hvd.allreduce(None), InvalidRequestError, "takes a tf.Tensor, not NoneType."),
        (lambda: unknown(tf.constant(1.0)), InvalidRequestError, "which a 0-d tensor does not have."),
        (lambda: tf.function(hvd.allreduce, jit_compile=True)(ones), UnsupportedError, jit),
        (lambda: hvd.broadcast(ones, 7), InvalidRequestError, "root 7 is not in process set 0"),
        (lambda: hvd.alltoall(ones, splits=[1, 1]), InvalidRequestError, "add up to 3 rows."),
        (lambda: hvd.broadcast_([ones], 0), InvalidRequestError, "takes variables, not EagerTensor."),
        (lambda: hvd.DistributedOptimizer("sgd"), InvalidRequestError, "tf_keras, not str."),
        (
            lambda: hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape())),
            InvalidRequestError,
            twice,
        ),
        (lambda: hvd.broadcast_variables(many, 0), AbortedError, "`broadcast_variables` of 2"),
        (lambda: hvd.broadcast_variables([tf.ones(2 + rank)], 0), InvalidRequestError, "takes variables"),
        (lambda: hvd.broadcast_variables([tf.Variable(tf.ones(2 + rank))], 0), MismatchError, "float32[3]"),
        (slopes, AbortedError, "DistributedGradientTape.0"),
    ]
    for package in (keras, tf_keras):
        plain = package.optimizers.SGD(0.1)
        optimizer = hvd.DistributedOptimizer(plain)
        model = package.Sequential([package.layers.Dense(1)])
        cases += [
            (functools.partial(hvd.DistributedOptimizer, optimizer), InvalidRequestError, twice),
            (functools.partial(hvd_keras.PartialDistributedOptimizer, optimizer), InvalidRequestError, twice),
            (
                functools.partial(model.compile, optimizer, loss="mse", jit_compile=True),
                UnsupportedError,
                jit,
            ),
        ]
    return cases


def _making() -> list[tuple[Callable[..., Any], str]]:
    """Return the functions that take an operator for gradients, each with the error's text for operators that it does
    not take."""
    import keras
    import tensorflow as tf
    import tf_keras

    import hvdlab.keras
    import hvdlab.tensorflow as hvd
    import hvdlab.tensorflow.keras as hvd_keras

    either = "Gradients are reduced with hvd.Average, hvd.Sum or hvd.Adasum, not with "
    of_keras = "Optimizers of Keras reduce gradients with hvd.Average or hvd.Sum, not with "
    tape, first = tf.GradientTape(), tf.compat.v1.train.GradientDescentOptimizer(0.1)
    makers: list[tuple[Callable[..., Any], str]] = [
        (lambda op: hvd.DistributedGradientTape(tape, op=op), either),
        (lambda op: hvd.PartialDistributedGradientTape(tape, op=op), either),
        (lambda op: hvd.DistributedOptimizer(first, op=op), either),
        (lambda op: hvd.DistributedOptimizer(first, op=op, backward_passes_per_step=2), either),
    ]
    for plain in (keras.optimizers.SGD(), tf_keras.optimizers.SGD(), tf_keras.optimizers.legacy.SGD()):
        for module in (hvd, hvd_keras, hvdlab.keras):
            makers.append((lambda op, o=plain, m=module: m.DistributedOptimizer(o, op=op), of_keras))
        makers.append((lambda op, o=plain: hvd_keras.PartialDistributedOptimizer(o, op=op), of_keras))
    return makers


def refused_operators() -> None:
    """Check that a wrong operator is refused when the tape or optimizer is made, not in the middle of the first
    step."""
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    for make, text in _making():
        for op in (hvd.Min, hvd.Max, hvd.Product):
            with pytest.raises(InvalidRequestError, match=f"^{re.escape(text)}{op.name.lower()}\\.$"):
                make(op)
        with pytest.raises(InvalidRequestError, match=r"^op=99 is no reduction operator; give hvd\.Average"):
            make(99)
        assert make(hvd.Average) is not None
        assert make(int(hvd.Sum)) is not None
    first = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    for op, option, text in (
        (hvd.Adasum, {"gradient_predivide_factor": 2.0}, "is for op=hvd.Average only"),
        (hvd.Average, {"gradient_predivide_factor": 0.0}, "must be positive, not 0.0"),
        (hvd.Adasum, {"backward_passes_per_step": 0}, "is at least 1, not 0"),
        (hvd.Average, {"backward_passes_per_step": 0}, "is at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            hvd.DistributedOptimizer(first, op=op, **option)


def refused() -> None:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    for call, kind, text in _cases():
        with pytest.raises(kind, match=re.escape(text)):
            call()
        assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size(), text


def _warned(package: Any, variable: Any, wrapped: Callable[[Any], Any]) -> None:
    import warnings

    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    optimizer = hvd.DistributedOptimizer(package.optimizers.SGD(0.1))
    optimizer.build([variable])
    source = variable if isinstance(variable, tf.Variable) else variable.value

    def step(both: bool) -> None:
        with tf.GradientTape() as tape:
            loss = source * source
        if both:
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients([(tape.gradient(loss, source), variable)])

    run = wrapped(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(False)
        assert not [each for each in caught if "reduced over the same ranks" in str(each.message)]
        run(True)
        run(True)
    texts = [str(each.message) for each in caught if "reduced over the same ranks" in str(each.message)]
    assert len(texts) == 1, texts
    assert "Use hvd.DistributedGradientTape or hvd.DistributedOptimizer, not both." in texts[0]


def reduced_twice() -> None:
    import keras
    import tensorflow as tf
    import tf_keras

    for wrapped in (tf.function, lambda step: step):
        _warned(keras, keras.Variable(1.0), wrapped)
        _warned(tf_keras, tf.Variable(1.0), wrapped)


def test_gradients_that_are_reduced_twice_are_named_once(two: Ranks) -> None:
    two.run(reduced_twice, timeout=60)


def test_operators_that_are_not_for_gradients_are_refused(two: Ranks) -> None:
    two.run(refused_operators, timeout=60)


def test_what_cannot_work_is_refused(two: Ranks) -> None:
    two.run(refused, timeout=60)

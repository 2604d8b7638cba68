"""How hvdlab describes TensorFlow's and Keras' values to the notebook."""

from __future__ import annotations

import pytest

from support.ranks.resident import Ranks


def described() -> None:
    import keras
    import numpy as np
    import tensorflow as tf
    import tf_keras  # type: ignore[import-untyped]  # has no types

    from hvdlab.bindings.framework_hooks import NotOurs, hooks_of
    from hvdlab.kernel_ext.rank.object_tree import leaves_of

    hooks = hooks_of("tensorflow")
    for value, dtype in (
        (tf.ones((2, 3)), "float32"),
        (tf.Variable([1, 2]), "int32"),
        (tf.ones(3, tf.bfloat16), "bfloat16"),
        (keras.Variable(np.ones(2, np.float32)), "float32"),
    ):
        source = hooks.array(value)
        assert source is not None
        assert (source.dtype, source.shape, source.device) == (dtype, tuple(value.shape), "cpu")
        assert source.read(0, source.nbytes).size == source.nbytes
    assert hooks.array(tf.constant(["text"])) is None
    assert hooks.nbytes(tf.ones((2, 3))) == 24
    for package in (keras, tf_keras):
        model = package.Sequential([package.layers.Dense(2), package.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
        parts = dict(hooks.parts(model) or ())
        assert len(parts) == 4
        assert all(hooks.array(part) is not None for part in parts.values())
        assert ".config" in dict(hooks.parts(model.optimizer) or ())
        variables = len(list(hooks.parts(model.optimizer) or ())) - 1
        for value, arrays in ((model, 4), (model.optimizer, variables), (model.weights[0], 1)):
            kinds = [leaf.kind for leaf in leaves_of(value).found]
            assert kinds.count("array") == arrays
            assert not {"error", "opaque"} & set(kinds)
    with pytest.raises(NotOurs):
        hooks.parts({})
    assert hooks.settings()["version"] == tf.__version__


def test_values_and_models(two: Ranks) -> None:
    two.run(described, ranks=[0], timeout=60)

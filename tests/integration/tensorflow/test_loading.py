"""``load_model``: files of Keras 3 and Keras 2 with optimizers of the user's own, with loss scaling, and with none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.ranks.resident import Ranks

FORMATS = {3: (".keras", ".h5"), 2: (".keras", ".h5", "")}


def _keras(version: int) -> Any:
    import importlib

    return importlib.import_module("keras" if version == 3 else "tf_keras")


def _load(version: int) -> Callable[..., Any]:
    """Return the public ``load_model`` for Keras 3; for Keras 2, which is not ``tf.keras`` here, the function that it
    calls."""
    import hvdlab.tensorflow.keras as hvd_keras
    from hvdlab.tensorflow.compression import Compression
    from hvdlab.tensorflow.keras.optimizers import load_model

    if version == 3:
        return hvd_keras.load_model
    return lambda path, custom_optimizers=None, custom_objects=None: load_model(
        _keras(version), path, custom_optimizers, custom_objects, Compression.none
    )


def _own(keras: Any) -> Any:
    """Return a user's own class of optimizer: SGD with a factor, a further setting, that makes its steps longer."""

    class Further(keras.optimizers.SGD):  # type: ignore[misc]
        def __init__(self, learning_rate: Any = 0.1, factor: float = 1.0, **kwargs: Any) -> None:
            super().__init__(learning_rate, **kwargs)
            self.factor = factor

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "factor": self.factor}

        def update_step(self, gradient: Any, variable: Any, *rest: Any) -> None:
            super().update_step(gradient * self.factor, variable, *rest)

    return Further


def _path(name: str) -> str:
    import hvdlab.tensorflow as hvd

    return os.path.join(os.environ["HVDLAB_TEST_FOLDER"], f"{hvd.rank()}-{name}")


def _data() -> tuple[Any, Any]:
    import hvdlab.tensorflow as hvd

    random = np.random.default_rng(hvd.rank())
    return random.normal(size=(8, 3)).astype(np.float32), random.normal(size=(8, 2)).astype(np.float32)


def _trained(keras: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    # Keras 3 can't read "mse" from an .h5 file.
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    model.fit(*_data(), batch_size=4, verbose=0)
    return model


def _save(model: Any, path: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns that these formats are old
        model.save(path, **options)


def _state(model: Any) -> list[Any]:
    variables = model.optimizer.variables
    listed = variables() if callable(variables) else variables
    return [np.array(each) for each in [*model.get_weights(), *listed]]


def _goes_on(model: Any, again: Any, whole: bool = True) -> None:
    """Check that the loaded model equals the saved one, with the optimizer's state if ``whole``, and trains with the other ranks."""
    import hvdlab.tensorflow as hvd
    from hvdlab.tensorflow.keras.optimizers import Distributed

    inner = getattr(again.optimizer, "inner_optimizer", again.optimizer)
    assert isinstance(inner, Distributed)
    parts = _state if whole else lambda each: each.get_weights()
    for mine, its in zip(parts(again), parts(model), strict=True):
        np.testing.assert_array_equal(mine, its)
    before = again.get_weights()
    again.fit(*_data(), batch_size=8, verbose=0)
    assert any((mine != its).any() for mine, its in zip(before, again.get_weights(), strict=True))
    every = hvd.allgather_object([weights.tolist() for weights in again.get_weights()])
    assert every == [every[0]] * hvd.size()


def own_optimizers(version: int) -> None:
    import hvdlab.tensorflow.keras as hvd_keras

    keras, load = _keras(version), _load(version)
    Further = _own(keras)

    def plain_one(**settings: Any) -> Any:
        return Further(**settings)

    def distributed_one(**settings: Any) -> Any:
        return hvd_keras.DistributedOptimizer(Further(**settings))

    model = _trained(keras, hvd_keras.DistributedOptimizer(Further(0.1, factor=3.0, momentum=0.5)))
    for number, ending in enumerate(FORMATS[version]):
        path = _path(f"own-{version}-{number}{ending}")
        _save(model, path)
        # hvdlab can read the class of the optimizer before Keras loads the model in these files only, not in a directory.
        made_by = {".keras": [Further, plain_one, distributed_one], ".h5": [distributed_one]}.get(ending, [])
        known: list[dict[str, Any]] = [
            {"custom_optimizers": [Further]},
            *({"custom_objects": {"Further": each}} for each in made_by),
        ]
        for options in known:
            again = load(path, **options)
            assert again.optimizer.factor == 3.0
            assert isinstance(again.optimizer, Further)
            _goes_on(model, again, whole=ending == ".keras")
        plain = keras.models.load_model(path, custom_objects={"Further": Further})
        assert type(plain.optimizer) is Further
        with pytest.raises((TypeError, ValueError), match=r"(?i)further"):
            load(path)


def without_optimizers(version: int) -> None:
    """Check that a file without optimizer gives a model without; a model that Keras did not compile can be compiled
    with a distributed one."""
    import hvdlab.tensorflow.keras as hvd_keras

    keras, load = _keras(version), _load(version)
    model = _trained(keras, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    path = _path(f"uncompiled-{version}.keras")
    _save(model, path)
    again = keras.models.load_model(path, compile=False)
    assert getattr(again, "optimizer", None) is None
    again.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
    again.fit(*_data(), batch_size=4, verbose=0)
    _save(keras.models.load_model(path, compile=False), path)
    assert getattr(load(path), "optimizer", None) is None


def scaled_losses(version: int) -> None:
    """Check that the optimizer within loss scaling is distributed, and only once."""
    import hvdlab.tensorflow.keras as hvd_keras

    keras, load = _keras(version), _load(version)
    scaled = keras.mixed_precision.LossScaleOptimizer
    model = _trained(keras, scaled(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))))
    path = _path(f"scaled-{version}.keras")
    _save(model, path)
    again = load(path)
    assert isinstance(again.optimizer, scaled)
    _goes_on(model, again)


@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize(
    "function",
    [own_optimizers, without_optimizers, scaled_losses],
    ids=lambda function: function.__name__,
)
def test_models_from_files(two: Ranks, function: Callable[[int], None], version: int) -> None:
    two.run(function, version, timeout=100)

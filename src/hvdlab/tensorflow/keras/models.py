"""Models from files, whose optimizers are distributed."""

from __future__ import annotations

from typing import Any

from hvdlab.tensorflow.compression import Compressor
from hvdlab.tensorflow.keras.optimizers import distributed, is_keras_optimizer

_PACKAGES = ("keras", "tf_keras")


def package_of(model: Any) -> str | None:
    """The package that a model comes from, Keras 3 or Keras 2; ``None`` if it is no model of Keras."""
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((name for name in _PACKAGES if name in packages and hasattr(model, "fit")), None)


def load_model(
    keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, compression: type[Compressor]
) -> Any:
    """See :func:`hvdlab.tensorflow.keras.load_model`; ``keras`` is the package whose models these are."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and is_keras_optimizer(optimizer):
        inner = getattr(optimizer, "inner_optimizer", None)
        # This very one: the model's functions and the loss scaling around it refer to it.
        distributed(optimizer if inner is None else inner, compression=compression, in_place=True)
    return model

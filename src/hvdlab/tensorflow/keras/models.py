"""Loads models from files, and makes their optimizers distributed."""

from __future__ import annotations

import importlib
import json
import os
import zipfile
from collections.abc import Callable
from types import FunctionType
from typing import Any

from hvdlab.tensorflow.compression import Compressor
from hvdlab.tensorflow.keras.optimizers import (
    Distributed,
    distributed,
    is_keras_optimizer,
    without_scaling,
)

_PACKAGES = ("keras", "tf_keras")


def package_of(model: Any) -> str | None:
    """The package that a model comes from, Keras 3 or Keras 2; ``None`` if it is no model of Keras."""
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((name for name in _PACKAGES if name in packages and hasattr(model, "fit")), None)


def load_model(
    keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, compression: type[Compressor]
) -> Any:
    """See :func:`hvdlab.tensorflow.keras.load_model`; ``keras`` is the module of Keras whose model it is."""
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    name = _saved_optimizer(filepath)
    if isinstance(objects.get(name), FunctionType):
        objects[name] = _class_of(objects[name])
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = without_scaling(getattr(model, "optimizer", None))
    _build(optimizer, model.trainable_variables)
    if is_keras_optimizer(optimizer) and not isinstance(optimizer, Distributed):
        # In place: the model's functions, and the loss scaling around the optimizer, refer to this object.
        distributed(optimizer, compression=compression, in_place=True)
    return model


def _build(optimizer: Any, variables: Any) -> None:
    """Build an optimizer anew that Keras 3 has built without variables, as for an ``.h5`` file: it could not train the model."""
    if (
        getattr(optimizer, "built", False)
        and variables
        and not getattr(optimizer, "_trainable_variables", variables)
    ):
        optimizer.built = False
        optimizer.build(variables)


def _saved_optimizer(filepath: Any) -> str | None:
    """The name of the optimizer's class in a file of Keras; ``None`` if the file does not have it."""
    path = os.fspath(filepath) if isinstance(filepath, str | os.PathLike) else ""
    found: Any = None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if "config.json" in file.namelist():  # else Keras raises an error for the file
                found = (json.loads(file.read("config.json")).get("compile_config") or {}).get("optimizer")
    elif os.path.isfile(path):
        h5py: Any = importlib.import_module("h5py")
        if h5py.is_hdf5(path):
            with h5py.File(path) as file:
                found = json.loads(file.attrs.get("training_config", "{}")).get("optimizer_config")
    while isinstance(found, dict) and "inner_optimizer" in (found.get("config") or {}):
        found = found["config"]["inner_optimizer"]
    return found.get("class_name") if isinstance(found, dict) else None


def _class_of(make: Callable[..., Any]) -> type:
    """A class whose ``from_config`` calls a function that makes the optimizer: Keras accepts only a class there."""
    return type(make.__name__, (), {"from_config": staticmethod(lambda config: make(**config))})

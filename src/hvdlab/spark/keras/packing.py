"""Keras models, and what belongs to them, as bytes: with the user's own classes, which the process that unpacks need not know before."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import keras


def pack(value: Any, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """A value that may hold models, optimizers, losses and metrics of Keras.

    Args:
        value: The value; what in it is Keras' is saved as Keras does, all else is pickled.
        custom_objects: The user's classes and functions in it, by name.
    """
    with keras.utils.custom_object_scope(custom_objects or {}):
        packed: bytes = cloudpickle.dumps((dict(custom_objects or {}), cloudpickle.dumps(value)))
    return packed


def unpack(data: bytes) -> Any:
    """What :func:`pack` packed. Unpacking runs code that is in it."""
    custom_objects, value = cloudpickle.loads(data)
    with keras.utils.custom_object_scope(custom_objects):
        return cloudpickle.loads(value)


def model_bytes(model: Any) -> bytes:
    """A model with its optimizer as the bytes of Keras' own ``.keras`` file."""
    with tempfile.TemporaryDirectory(prefix="hvdlab-keras-") as place:
        file = Path(place, "model.keras")
        model.save(file)
        return file.read_bytes()


def model_of(data: bytes, custom_objects: Mapping[str, Any] | None) -> Any:
    """The model of a ``.keras`` file's bytes, compiled as it was saved; runs no functions that the file holds.

    Raises:
        ValueError: They are no such file, or need a class that is not among ``custom_objects``.
    """
    with tempfile.TemporaryDirectory(prefix="hvdlab-keras-") as place:
        file = Path(place, "model.keras")
        file.write_bytes(data)
        return keras.models.load_model(file, custom_objects=dict(custom_objects or {}))

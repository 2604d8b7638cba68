"""Hooks for TensorFlow and Keras, beside their binding :mod:`hvdlab.tensorflow`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from hvdlab.bindings.framework_hooks import (
    ArraySource,
    FrameworkHooks,
    NotOurs,
    Part,
    is_instance_type,
    module_of,
    numpy_source,
)

_PACKAGES = ("tensorflow", "keras", "tf_keras")
_KERAS = ("keras", "tf_keras")


class TensorflowHooks(FrameworkHooks):
    """Hooks for TensorFlow's tensors and variables, which are copied to the host to be read, and Keras' models and optimizers.

    The fork server imports TensorFlow only if ``HVDLAB_PRELOAD`` names it: that takes seconds and 500 MB. Its pools of
    threads, which a fork would lose, are made when it first computes, so ranks may be forked after the import.
    """

    binding = "hvdlab.tensorflow"
    # Each rank would show some ten lines in the first cell: which instructions this TensorFlow was built for, that there is
    # no GPU. Warnings and errors of its C++ side are still written.
    environment = MappingProxyType({"TF_CPP_MIN_LOG_LEVEL": "1"})

    def array(self, value: Any) -> ArraySource | None:
        if module_of(type(value)) not in _PACKAGES or not (
            hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "numpy")
        ):
            return None
        import numpy

        array = numpy.asarray(value)
        if array.dtype == object or array.dtype.kind in "SU":
            return None  # strings
        label = str(getattr(value.dtype, "name", value.dtype))
        if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
            array = array.view(numpy.uint16)
        return numpy_source(
            array,
            dtype=label,
            shape=tuple(value.shape),
            device=_device(str(getattr(value, "device", "") or "")),
        )

    def is_all_elements(self, kind: type) -> bool:
        """Return True for variables: their attributes are the memory's handle, and names that each process counts for itself."""
        return module_of(kind) in _PACKAGES

    def parts(self, value: Any) -> Iterable[Part] | None:
        kind = type(value)
        if module_of(kind) not in _PACKAGES:
            raise NotOurs
        for package in _KERAS:
            if is_instance_type(kind, f"{package}.layers", "Layer"):
                return _weights(value)
            if is_instance_type(kind, f"{package}.optimizers", "Optimizer"):
                return _of_optimizer(value)
        raise NotOurs

    def nbytes(self, value: Any) -> int:
        if module_of(type(value)) not in _PACKAGES:
            return 0
        size = getattr(getattr(value, "dtype", None), "size", 0)
        elements = getattr(getattr(value, "shape", None), "num_elements", lambda: 0)()
        return size * elements if isinstance(size, int) and isinstance(elements, int) else 0

    def settings(self) -> dict[str, Any]:
        tensorflow: Any = sys.modules["tensorflow"]
        found = {"version": str(tensorflow.__version__)}
        for package in _KERAS:
            module: Any = sys.modules.get(package)
            if module is not None and hasattr(module, "__version__"):
                found[package] = str(module.__version__)
        return found


def _device(name: str) -> str:
    """Return ``cpu`` or ``gpu:0`` for TensorFlow's long name."""
    short = name.rpartition("device:")[2].lower()
    return "cpu" if short in ("", "cpu:0") else short


def _weights(layer: Any) -> list[Part]:
    """Return the weights of a layer or model, by the ends of their paths: Keras can rename a layer's surroundings when it loads it."""
    return [
        (f"[{number}] {'/'.join(_path(weight).split('/')[-2:])}", weight)
        for number, weight in enumerate(layer.weights)
    ]


def _of_optimizer(optimizer: Any) -> list[Part]:
    listed: Any = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [
        (".config", {name: repr(value) for name, value in optimizer.get_config().items()}),
        *((f"[{number}] {_path(variable)}", variable) for number, variable in enumerate(listed)),
    ]


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", "") or getattr(variable, "name", ""))


HOOKS = TensorflowHooks()

"""Hooks for JAX, the only place that knows its names."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.framework_hooks import ArraySource, FrameworkHooks, module_of, numpy_source

_PACKAGES = ("jax", "jaxlib")


class JaxHooks(FrameworkHooks):
    """Hooks for JAX's arrays, which are copied to the host to be read."""

    def array(self, value: Any) -> ArraySource | None:
        if module_of(type(value)) not in _PACKAGES or not (
            hasattr(value, "dtype") and hasattr(value, "shape")
        ):
            return None
        import numpy

        return numpy_source(
            numpy.asarray(value),
            dtype=str(value.dtype),
            shape=tuple(value.shape),
            device=str(getattr(value, "device", "cpu")),
        )


HOOKS = JaxHooks()

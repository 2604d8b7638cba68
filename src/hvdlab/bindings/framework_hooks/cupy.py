"""Hooks for CuPy, the only place that knows its names."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.framework_hooks import ArraySource, FrameworkHooks, module_of, numpy_source

_PACKAGES = ("cupy",)


class CupyHooks(FrameworkHooks):
    """Hooks for CuPy's arrays, which are copied to the host to be read."""

    def array(self, value: Any) -> ArraySource | None:
        if module_of(type(value)) not in _PACKAGES or not (
            hasattr(value, "dtype") and hasattr(value, "shape")
        ):
            return None
        return numpy_source(
            value.get(),
            dtype=str(value.dtype),
            shape=tuple(value.shape),
            device=str(getattr(value, "device", "cpu")),
        )


HOOKS = CupyHooks()

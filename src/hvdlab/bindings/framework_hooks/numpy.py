"""Hooks for numpy's arrays and random states."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hvdlab.bindings.framework_hooks import (
    ArraySource,
    FrameworkHooks,
    NotOurs,
    Part,
    is_instance_type,
    numpy_source,
)


class NumpyHooks(FrameworkHooks):
    """Hooks for numpy's arrays, scalars and generators."""

    preload = True

    def array(self, value: Any) -> ArraySource | None:
        kind = type(value)  # not isinstance(), which may run code of the value's class
        if not is_instance_type(kind, "numpy", "ndarray") or value.dtype.hasobject:
            return None
        return None if is_instance_type(kind, "numpy.ma", "MaskedArray") else numpy_source(value)

    def is_plain(self, kind: type) -> bool:
        return is_instance_type(kind, "numpy", "generic") or is_instance_type(kind, "numpy", "dtype")

    def plain(self, value: Any) -> tuple[bytes, str]:
        if is_instance_type(type(value), "numpy", "generic"):
            return str(value.dtype).encode() + value.dtype.str.encode() + value.tobytes(), str(value)
        text = repr(value)
        # A user's text can have half a character, which UTF-8 refuses.
        return text.encode("utf-8", "surrogatepass"), text

    def parts(self, value: Any) -> Iterable[Part] | None:
        kind = type(value)
        if is_instance_type(kind, "numpy.ma", "MaskedArray"):
            numpy = sys.modules["numpy"]
            return [
                (".data", numpy.asarray(value.data)),
                (".mask", numpy.ma.getmaskarray(value)),
                (".fill_value", value.fill_value),
            ]
        if is_instance_type(kind, "numpy", "ndarray"):  # of Python objects, or array() would have taken it
            items = value.reshape(-1).tolist()
            return [(".shape", value.shape), (".dtype", str(value.dtype)), (".items", items)]
        if is_instance_type(kind, "numpy.random", "Generator"):
            return [(".state", value.bit_generator.state)]
        if is_instance_type(kind, "numpy.random", "RandomState"):
            return [(".state", value.get_state(legacy=False))]
        raise NotOurs

    def memory(self, value: Any) -> tuple[str, int, int] | None:
        if not is_instance_type(type(value), "numpy", "ndarray"):
            return None
        base = value
        while getattr(base, "base", None) is not None and hasattr(base.base, "nbytes"):
            base = base.base
        address = getattr(base, "__array_interface__", {}).get("data", (id(base),))[0]
        return ("cpu", int(address), int(base.nbytes)) if hasattr(base, "nbytes") else None

    def nbytes(self, value: Any) -> int:
        size = getattr(value, "nbytes", 0) if type(value).__module__ == "numpy" else 0
        return size if isinstance(size, int) else 0

    def random_states(self) -> dict[str, Any]:
        random = sys.modules.get("numpy.random")
        return {} if random is None else {"numpy": random.get_state(legacy=False)}

    def reseed(self) -> None:
        sys.modules["numpy"].random.seed()


HOOKS = NumpyHooks()

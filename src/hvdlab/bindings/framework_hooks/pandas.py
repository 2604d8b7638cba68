"""Hooks for pandas, the only place that knows its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdlab.bindings.framework_hooks import FrameworkHooks, NotOurs, Part, is_instance_type, module_of


class PandasHooks(FrameworkHooks):
    """Hooks for pandas' tables, columns and indexes, and its dates."""

    def is_plain(self, kind: type) -> bool:
        return module_of(kind) == "pandas" and any(
            is_instance_type(kind, "pandas", name) for name in ("Timestamp", "Timedelta", "Period")
        )

    def plain(self, value: Any) -> tuple[bytes, str]:
        text = repr(value)
        resolution = getattr(value, "unit", "")  # nanoseconds or seconds: it makes arithmetic overflow or not
        return f"{text} {resolution}".encode("utf-8", "surrogatepass"), text

    def parts(self, value: Any) -> Iterable[Part] | None:
        kind = type(value)
        if is_instance_type(kind, "pandas", "DataFrame"):
            columns = [(f"[{name!r}]", value.iloc[:, n].array) for n, name in enumerate(value.columns)]
            return [
                (".index", value.index),
                (".columns", value.columns),
                *columns,
                (".attrs", dict(value.attrs)),
            ]
        if is_instance_type(kind, "pandas", "Series"):
            return [
                (".index", value.index),
                (".name", value.name),
                (".values", value.array),
                (".attrs", dict(value.attrs)),
            ]
        if is_instance_type(kind, "pandas", "Index"):
            return [
                (".names", list(value.names)),
                (".dtype", str(value.dtype)),
                (".values", value.to_numpy()),
            ]
        if is_instance_type(kind, "pandas.arrays", "NumpyExtensionArray"):
            return [(".values", value.to_numpy())]
        if is_instance_type(kind, "pandas", "Categorical"):
            return [
                (".categories", value.categories),
                (".ordered", bool(value.ordered)),
                (".codes", value.codes),
            ]
        if is_instance_type(kind, "pandas.api.extensions", "ExtensionArray"):
            return [(".dtype", str(value.dtype)), (".values", value.to_numpy())]
        raise NotOurs


HOOKS = PandasHooks()

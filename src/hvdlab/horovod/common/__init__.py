"""``horovod.common``: the part of Horovod that all frameworks share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hvdlab.horovod.import_hook import target


def __getattr__(name: str) -> Any:
    if name in ("basics", "elastic", "exceptions", "process_sets", "util"):
        return import_module(target(f"horovod.common.{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Importing ipyparallel: two threads must not begin that at different ends of its import cycle."""

from __future__ import annotations

import importlib
import threading

_importing = threading.Lock()


def load_ipyparallel() -> None:
    """Import ipyparallel whole. Call it before any import of a part of it. Raises ``ImportError``."""
    with _importing:
        importlib.import_module("ipyparallel")

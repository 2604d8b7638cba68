"""Which variables of a frame a debugger shows."""

from __future__ import annotations

import re

_MODULES = ("name", "doc", "package", "loader", "spec", "annotations", "builtins", "builtin")
_IPYTHONS = ("get_ipython", "exit", "quit", "In", "Out", "_oh", "_dh", "_ih", "__", "___")
_HIDDEN = frozenset([*(f"__{name}__" for name in _MODULES), *_IPYTHONS])
_KEPT = re.compile(r"_i*\d*\Z")


def shown(name: str) -> bool:
    """Whether a debugger shows a variable of this name: not those that Python and IPython keep for themselves."""
    return name not in _HIDDEN and not _KEPT.match(name)

"""Texts of users' objects, as messages can carry them."""

from __future__ import annotations

import base64
import numbers
from typing import Any


def wire_text(text: str) -> str:
    """Return the text as a plain ``str``, since the encoder of messages refuses subclasses; lone surrogates escaped.

    ``str(error)`` and ``_repr_html_`` may well return a subclass, such as ``numpy.str_``, ``markupsafe.Markup`` or the
    text that a data loader of torch makes of a ``KeyError``.
    """
    exact = str.__str__(text)
    return exact if exact.isascii() else exact.encode("utf-8", "backslashreplace").decode()


DEEPEST = 100
"""How deep dictionaries and lists may lie within each other; messages can't carry any depth."""


_INT64 = range(-(1 << 63), 1 << 64)


def wire_value(value: Any, depth: int = 0) -> Any:
    """Return the value itself if it can be sent, else what comes nearest to it."""
    if isinstance(value, str):
        return wire_text(value)
    if depth > DEEPEST:
        raise RecursionError(f"it is nested more than {DEEPEST} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):  # numpy's as well, as in a kernel
        return int(value) if int(value) in _INT64 else str(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {wire_text(str(key)): wire_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [wire_value(item, depth + 1) for item in value]
    return wire_text(str(value))


def rough_size(size: int) -> str:
    """``2.0 GiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"

"""Values without parts: their contents as bytes, and in a few words."""

from __future__ import annotations

import struct
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

LONGEST = 80
"""Characters of a value that are shown."""

_PICKLED = frozenset({"datetime", "decimal", "fractions", "uuid", "pathlib", "zoneinfo", "ipaddress", "re"})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
_CONSTANTS = (type(None), type(Ellipsis), type(NotImplemented), range, slice)
_TORCH = frozenset({"device", "dtype", "layout", "memory_format", "Size"})


def is_scalar(value: Any) -> bool:
    """Whether :func:`content` knows it."""
    return is_scalar_type(type(value))


def is_scalar_type(kind: type) -> bool:
    """Whether :func:`content` knows values of this type."""
    return (
        issubclass(kind, tuple(_PLAIN))
        or kind in _CONSTANTS
        or issubclass(kind, (*_FUNCTIONS, Enum, np.generic))
        or (kind.__module__ == "torch" and kind.__name__ in _TORCH)
        or kind.__module__.partition(".")[0] in _PICKLED
    )


def content(value: Any) -> tuple[bytes, str]:
    """What makes two values of a type the same, and the value in words. For what :func:`is_scalar` takes."""
    kind = type(value)
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    if kind is Hidden:
        return value.encode("utf-8", "surrogatepass"), "<not shown>"
    if issubclass(kind, _FUNCTIONS):
        return _of_function(value)
    if issubclass(kind, Enum):
        text = f"{kind.__name__}.{value._name_}"
        return text.encode(), text
    if issubclass(kind, np.generic):
        return value.dtype.str.encode() + value.tobytes(), shortened(str(value))
    for base, describe in _PLAIN.items():
        if issubclass(kind, base):
            return describe(_as_plain(base, value))
    text = repr(value)  # of the standard library's own classes, or torch's
    return text.encode("utf-8", "surrogatepass"), shortened(text)


class Hidden(str):
    """A text that is compared and not shown."""

    __slots__ = ()


def _as_plain(base: Any, value: Any) -> Any:
    """What a subclass of the user's adds to, without asking it."""
    if base in (bytes, bytearray):
        return base.__getitem__(value, slice(None))
    return str.__str__(value) if base is str else base.__pos__(value)


def _of_function(value: Any) -> tuple[bytes, str]:
    if isinstance(value, types.ModuleType):
        version = getattr(value, "__version__", "")
        text = f"{value.__name__} {version}".strip() if isinstance(version, str) else value.__name__
        return text.encode(), shortened(text)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        # Constants that are code have addresses in their text.
        plain = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
        return name.encode() + code.co_code + repr(plain).encode("utf-8", "surrogatepass"), shortened(name)
    return name.encode(), shortened(name)


def _of_int(value: int) -> tuple[bytes, str]:
    bits = value.bit_length()
    data = value.to_bytes(bits // 8 + 1, "little", signed=True)
    # Python refuses to print very long ones, and takes long for long ones.
    return data, str(value) if bits <= 256 else f"<an int of {bits} bits>"


def _of_text(value: str) -> tuple[bytes, str]:
    return value.encode("utf-8", "surrogatepass"), shortened(repr(value[: LONGEST + 1]), len(value) > LONGEST)


def _of_bytes(value: bytes | bytearray) -> tuple[bytes, str]:
    return bytes(value), shortened(repr(bytes(value[: LONGEST + 1])), len(value) > LONGEST)


_PLAIN: dict[type, Callable[[Any], tuple[bytes, str]]] = {
    bool: lambda value: (str(value).encode(), str(value)),
    int: _of_int,
    float: lambda value: (struct.pack("<d", value), repr(value)),
    complex: lambda value: (struct.pack("<dd", value.real, value.imag), repr(value)),
    str: _of_text,
    bytes: _of_bytes,
    bytearray: _of_bytes,
}


def shortened(text: str, more: bool = False) -> str:
    """At most :data:`LONGEST` characters, printable ones of any encoding."""
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return f"{text[:LONGEST]}…" if more or len(text) > LONGEST else text


def type_name(kind: type) -> str:
    """``int``, ``torch.Tensor``, ``Net``: with the package it is from, unless that is Python or the notebook."""
    package = str(kind.__module__).partition(".")[0]
    name = kind.__qualname__.rpartition("<locals>.")[2]
    return (
        name
        if package in ("builtins", "__main__") or package in sys.stdlib_module_names
        else f"{package}.{name}"
    )

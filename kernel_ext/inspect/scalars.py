"""Values without parts: their contents as bytes, and in a few words."""

from __future__ import annotations

import re
import struct
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

from hvdlab.bindings.framework_hooks import FrameworkHooks, loaded
from hvdlab.collectives.fingerprint import fingerprint

LONGEST = 80
"""Characters of a value that are shown."""

_PICKLED = frozenset({"datetime", "decimal", "fractions", "uuid", "pathlib", "zoneinfo", "ipaddress", "re"})
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    type,
    types.ModuleType,
)
_CONSTANTS = (type(None), type(Ellipsis), type(NotImplemented), range, slice)


def is_scalar(value: Any) -> bool:
    """Whether :func:`content` knows this value."""
    return is_scalar_type(type(value))


def is_scalar_type(kind: type) -> bool:
    """Whether :func:`content` knows values of this type."""
    return (
        issubclass(kind, tuple(_PLAIN))
        or kind in _CONSTANTS
        or issubclass(kind, (*_FUNCTIONS, types.CodeType, Enum))
        or kind.__module__.partition(".")[0] in _PICKLED
        or framework_of(kind) is not None
    )


def framework_of(kind: type) -> FrameworkHooks | None:
    """The hooks that know values of this type."""
    return next((hooks for hooks in loaded() if hooks.is_plain(kind)), None)


def content(value: Any) -> tuple[bytes, str]:
    """Bytes that are equal for equal values of a type, and the value in words. Only for what :func:`is_scalar` accepts."""
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
    if kind is types.CodeType:
        return _of_code(value)
    if kind is re.Pattern:  # its repr ends after 200 characters
        return repr((value.pattern, value.flags)).encode("utf-8", "surrogatepass"), shortened(repr(value))
    if (hooks := framework_of(kind)) is not None:
        data, text = hooks.plain(value)
        return data, shortened(text)
    for base, describe in _PLAIN.items():
        if issubclass(kind, base):
            return describe(_as_plain(base, value))
    text = repr(value)  # of the standard library's own classes
    return text.encode("utf-8", "surrogatepass"), shortened(text)


class Hidden(str):
    """A text that is compared and not shown."""

    __slots__ = ()


def _as_plain(base: Any, value: Any) -> Any:
    """The built-in value that an instance of a user's subclass is, without calling code of that class."""
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
    data = _of_code(code)[0] if isinstance(code, types.CodeType) else b""
    return name.encode() + data, shortened(name)


def _of_code(code: types.CodeType) -> tuple[bytes, str]:
    """Return the instructions, constants and names of code, without its place: a line above it makes no difference."""
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = [code.co_code, code.co_exceptiontable, repr((shape, names)).encode("utf-8", "surrogatepass")]
    data = fingerprint(*(fingerprint(part) for part in parts), _of_constant(code.co_consts))
    return data, f"{shortened(code.co_qualname)} #{data.hex()[:6]}"


def _of_constant(value: Any) -> bytes:
    """A fingerprint of a constant of code: a set has no order, and the repr of a code object has an address in it."""
    if isinstance(value, types.CodeType):
        return _of_code(value)[0]
    if isinstance(value, (tuple, frozenset)):
        inner = [_of_constant(item) for item in value]
        return fingerprint(
            type(value).__name__.encode(), *(sorted(inner) if isinstance(value, frozenset) else inner)
        )
    return fingerprint(f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass"))


def _of_int(value: int) -> tuple[bytes, str]:
    bits = value.bit_length()
    data = value.to_bytes(bits // 8 + 1, "little", signed=True)
    # Python refuses to print very long integers, and takes long for long ones.
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


SHOWN_WHOLE = 40
"""Characters (or bytes) of a text up to which it is shown whole, wherever it is shown."""


def long_text(value: Any) -> tuple[str, str | bytes] | None:
    """``text``, ``bytes`` or ``hex``, and the characters to compare one by one; None if the value can be shown whole."""
    kind = type(value)
    if kind is Hidden:
        return None
    if issubclass(kind, str):
        text = str.__str__(value)
        return ("text", text) if len(text) > SHOWN_WHOLE else None
    if issubclass(kind, (bytes, bytearray)):
        base = bytes if issubclass(kind, bytes) else bytearray
        raw = bytes(base.__getitem__(value, slice(None)))
        return ("bytes", raw) if len(raw) > SHOWN_WHOLE else None
    if issubclass(kind, int) and int.bit_length(value) > 4 * SHOWN_WHOLE:
        return "hex", hex(int.__pos__(value))
    return None


SCALAR_TYPES: tuple[type, ...] = (*_PLAIN, Hidden, *_CONSTANTS)
"""Types whose values a leaf compares completely."""


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

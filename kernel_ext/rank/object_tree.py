"""A value taken apart: the parts of an object with the steps to them, the contents of plain values, and the leaves of the whole.

The parts of a value are everything in which two such values could differ. A part that can't be read (the inside of a C
extension's object that pickle does not get either) is one too: :class:`Unknown`.

Of the user's code only that runs here which frameworks call. Containers are read by the built-in types that they derive
from, objects by their ``__dict__``, and nothing is printed by its own ``__repr__``.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.fingerprints import SIZE, fingerprint
from hvdlab.bindings.framework_hooks import (
    ArraySource,
    FrameworkHooks,
    NotOurs,
    Part,
    loaded,
    module_of,
    numpy_source,
)
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.wire.compare import Difference

STRIDE = 96 << 10
"""Bytes that are worked on at once, so that results stay in the cache, and in memory that malloc keeps at hand."""

_AS_FLOAT = {"bfloat16": np.dtype(np.uint16)}

Array = npt.NDArray[Any]


def numeric(raw: Bytes, dtype: str, itemsize: int) -> Array | None:
    """Return these bytes as numbers of the type that a framework calls ``dtype``; None if numpy does not know the type."""
    if dtype in _AS_FLOAT:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    try:
        known = np.dtype(dtype)
    except TypeError:
        return None
    fits = known.kind in "biufc" and known.itemsize == itemsize
    return raw.view(known) if fits else None


def compare(ours: Bytes, theirs: Bytes, dtype: str, itemsize: int) -> Difference:
    """Compare two ranges of whole elements bit by bit; with magnitudes where the elements are numbers.

    A difference from NaN is no number, so NaN does not count for the largest differences.
    """
    count, first = 0, -1
    largest: float | None = None
    relative: float | None = None
    stride = _stride(itemsize)
    for start in range(0, ours.nbytes, stride):
        end = start + stride
        a, b = ours[start:end], theirs[start:end]
        odd = _differing(a, b, itemsize)
        found = int(np.count_nonzero(odd))
        if not found:
            continue
        count += found
        if first < 0:
            first = start // itemsize + int(odd.argmax())
        here, there = numeric(a, dtype, itemsize), numeric(b, dtype, itemsize)
        if here is not None and there is not None:
            if found < odd.size // 8:  # else choosing elements takes longer than computing with all
                here, there = here[odd], there[odd]
            most, rel = _magnitudes(here, there)
            largest, relative = _more(largest, most), _more(relative, rel)
    if not count:
        return Difference(0)
    where = slice(first * itemsize, (first + 1) * itemsize)
    return Difference(
        count,
        first,
        element(ours[where], dtype, itemsize),
        element(theirs[where], dtype, itemsize),
        largest,
        relative,
    )


def _stride(itemsize: int) -> int:
    """Return the number of bytes of whole elements; half-precision ones become twice as large."""
    return max(1, STRIDE // max(4, itemsize)) * itemsize


def _differing(a: Bytes, b: Bytes, itemsize: int) -> npt.NDArray[np.bool_]:
    """For each element, whether its bytes differ."""
    if itemsize in (1, 2, 4, 8):
        word = np.dtype(f"u{itemsize}")
        same_size: npt.NDArray[np.bool_] = a.view(word) != b.view(word)
        return same_size
    odd: npt.NDArray[np.bool_] = (a.reshape(-1, itemsize) != b.reshape(-1, itemsize)).any(axis=1)
    return odd


def _magnitudes(a: Array, b: Array) -> tuple[float | None, float | None]:
    """Return the largest absolute and relative difference."""
    with np.errstate(all="ignore"):
        if a.dtype.kind == "f" and a.dtype.itemsize == 2:
            a, b = a.astype(np.float32), b.astype(np.float32)
        if a.dtype.kind == "f":
            most, relative = _quick(a, b)
            if np.isfinite(most) and np.isfinite(relative):
                return float(most), float(relative)
            a, b = a.astype(np.float64), b.astype(np.float64)
        return _careful(a, b)


def _quick(a: Array, b: Array) -> tuple[Any, Any]:
    """Return the same in the elements' own precision and few passes; not finite if elements are not, or differ by too much."""
    apart = np.subtract(a, b)
    np.abs(apart, out=apart)
    most = apart.max()
    bound = np.abs(a)
    np.maximum(bound, np.abs(b), out=bound)
    np.maximum(bound, np.finfo(a.dtype).tiny, out=bound)
    np.divide(apart, bound, out=apart)
    return most, apart.max()


def _careful(a: Array, b: Array) -> tuple[float | None, float | None]:
    if a.dtype.kind == "b":
        a, b = a.astype(np.uint8), b.astype(np.uint8)
    if a.dtype.kind in "iu":  # exact, whatever the size
        apart = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        bound = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    else:
        apart = np.abs(a - b)
        bound = np.maximum(np.abs(a), np.abs(b))
    known = ~np.isnan(apart)
    if not known.any():
        return None, None
    apart, bound = apart[known], bound[known]
    relative = np.where(bound > 0, apart / bound, 0.0)
    relative = relative[~np.isnan(relative)]  # inf - 1 relative to inf
    return float(apart.max()), float(relative.max()) if relative.size else None


def _more(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def element(raw: Bytes, dtype: str, itemsize: int) -> str:
    """Return one element in words."""
    number = numeric(raw, dtype, itemsize)
    if number is not None:
        return str(number[0])
    if dtype.startswith(("<U", "|S", "datetime64", "timedelta64")):
        return str(raw.view(np.dtype(dtype))[0])[:80]
    return raw.tobytes()[:16].hex()


def not_finite(raw: Bytes, dtype: str, itemsize: int) -> tuple[int, int]:
    """Return how many of the elements are NaN, and how many infinite."""
    nans = infs = 0
    stride = _stride(itemsize)
    for start in range(0, raw.nbytes, stride):
        part = numeric(raw[start : start + stride], dtype, itemsize)
        if part is None or part.dtype.kind not in "fc":
            return 0, 0
        finite = np.isfinite(part)
        if not finite.all():
            odd = part[~finite]
            nan = int(np.isnan(odd).sum())
            nans, infs = nans + nan, infs + odd.size - nan
    return nans, infs


Bytes = npt.NDArray[np.uint8]


def array_source(value: Any) -> ArraySource | None:
    """``value`` as an array; None if it is no array, or one of Python objects. Raises what the framework raises."""
    for hooks in loaded():
        if (source := hooks.array(value)) is not None:
            return source
    return None


LONG = 64
"""A list of more items than this is compared as one array."""

_OPAQUE = frozenset(
    {
        "hvdlab",
        "ipyparallel",
        "IPython",
        "threading",
        "_thread",
        "logging",
        "asyncio",
        "concurrent",
        "socket",
        "zmq",
    }
)

_POINTER = object.__basicsize__ // 2
"""Bytes that a slot, or a reference to a ``__dict__``, adds to an object."""

_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INSTALLED = tuple(
    os.path.join(path, "")
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.join(_HOME, "hvdlab") if os.path.basename(_HOME) != "hvdlab" else _HOME,
        *(str(Path(__file__).resolve().parents[2] / room) for room in ("kernel_ext", "collectives")),
    }
)


@dataclass(frozen=True, slots=True)
class Long:
    """A list that is too long for a leaf for each item."""

    items: list[Any]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Hidden state of an object of this type, inside of a C extension."""

    kind: type


Parts = Iterable[Part] | Long | None


def parts_of(value: Any) -> Parts:
    """Return the parts of a value; None if it has none that can be had, and may differ all the same."""
    kind = type(value)
    for hooks in loaded():
        try:
            return hooks.parts(value)
        except NotOurs:
            continue
    for base, take in _KINDS.items():
        if issubclass(kind, base):
            found = take(value)
            return found if isinstance(found, Long) or kind is base else [*found, *_added(value)]
    if module_of(kind) in _OPAQUE:
        return None
    if not has_c_state(kind):
        return attributes(value)
    return _from_c(value)


def beside(value: Any) -> Iterable[Part]:
    """Return the parts of a value that has a leaf of its own, without the part that the leaf compares.

    Such as the defaults of a function, or the attributes of a user's class and of a number that is of such a class.
    """
    kind = type(value)
    if issubclass(kind, types.FunctionType):
        return _function(value)
    if issubclass(kind, (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = value.__self__
        bound = (
            not isinstance(owner, (types.ModuleType, type, type(None)))
            and module_of(type(owner)) not in _OPAQUE
        )
        function = [(".__func__", value.__func__)] if kind is types.MethodType and bound else []
        return [*([(".__self__", owner)] if bound else []), *function]
    if issubclass(kind, type):
        return _class(value) if is_users_module(value.__module__) else ()
    if issubclass(kind, types.ModuleType):
        return _module(value)
    if issubclass(kind, Enum):
        return [(".value", value._value_)]
    base = next((base for base in SCALAR_TYPES if issubclass(kind, base)), kind)
    return () if kind is base else _added(value)


def has_c_state(kind: type) -> bool:
    """Return whether objects of a type have more inside than their ``__dict__`` and slots: C code put it there.

    Python's classes add to the size of objects exactly the size of their slots.
    """
    if kind.__itemsize__:
        return True
    while kind is not object:
        base = kind.__base__ or object
        added = kind.__basicsize__ - base.__basicsize__ - _POINTER * len(list(_own_slots(kind)))
        # Newer releases keep these two in front of the object; then their offsets are below zero.
        added -= _POINTER * (kind.__dictoffset__ > 0 and not base.__dictoffset__)
        added -= _POINTER * (kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__)
        if added > 0:
            return True
        kind = base
    return False


def _from_c(value: Any) -> Iterable[Part] | None:
    """Return the parts of an object of a C extension: its state for pickle, unless code of the user's would make that."""
    kind = type(value)
    held = list(attributes(value) or ())
    reduced = None
    if _reduces(kind):
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001  # many refuse, each in its own way
            reduced = None
    if isinstance(reduced, str):  # found by its name, as functions are
        return [(".__reduce__()", reduced), *held]
    if isinstance(reduced, tuple):
        described = [
            list(part) if n in (3, 4) and part is not None else part for n, part in enumerate(reduced)
        ]
        return [(f".__reduce__()[{n}]", part) for n, part in enumerate(described)]
    return [*held, (" (inside)", Unknown(kind))] if held else None


def _reduces(kind: type) -> bool:
    """Return whether a type has its own way to be pickled, and that is not code of the user's."""
    found = False
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        owner = next(cls for cls in (*kind.__mro__, object) if name in cls.__dict__ or cls is object)
        if owner is object:
            continue
        if is_users_module(owner.__module__):
            return False
        found = True
    return found


def attributes(value: Any) -> Iterable[Part] | None:
    """Return name and value of each entry of an object's ``__dict__`` and slots; None if it has neither."""
    found: dict[str, Any] = {}
    names = [name for cls in type(value).__mro__ for name in _own_slots(cls)]
    try:
        # Not getattr, nor vars: a class of the user's may answer for them.
        found.update(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        if not names:
            return None
    for name in names:
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:  # it has no value yet
            continue
    return [(f".{name}", item) for name, item in found.items()]


def _own_slots(cls: type) -> Iterable[str]:
    names = cls.__dict__.get("__slots__", ())
    for name in [names] if isinstance(names, str) else names:
        if name not in ("__dict__", "__weakref__"):
            # Python puts the class's name before a name that begins with two underscores.
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{cls.__name__.lstrip('_')}{name}" if private else name


def _added(value: Any) -> Iterable[Part]:
    """Return the attributes that a class derived from a built-in one adds to a value."""
    return () if type(value) in _COMPLETE else attributes(value) or ()


@functools.cache
def is_users_module(name: str) -> bool:
    """Return whether a module is the notebook or a file of the user's: neither Python's, nor ours, nor installed."""
    if name == "__main__":
        return True
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return False
    real = os.path.realpath(file)
    return not (file.startswith(_INSTALLED) or real.startswith(_INSTALLED) or "site-packages" in real)


# -- kinds ----------------------------------------------------------------------------------------------------------


def _function(value: Any) -> Iterable[Part]:
    if module_of(value) in _OPAQUE:
        return ()
    found: list[Part] = []
    for name in ("__defaults__", "__kwdefaults__"):
        if held := getattr(value, name):
            found.append((f".{name}", held))
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            found.append((f".{name}", cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    return [*found, *((f".{name}", item) for name, item in value.__dict__.items())]


_NO_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)
_CALLED = (types.FunctionType, staticmethod, classmethod, property)


def _class(value: Any) -> Iterable[Part]:
    """Return bases and attributes of a class of the user's; Python's own entries have underscores around their names."""
    bases = [(f".__bases__[{n}]", base) for n, base in enumerate(value.__bases__) if base is not object]
    inside = type.__dict__["__dict__"].__get__(value)
    if issubclass(value, Enum):
        members = {name: member for name, member in inside.get("_member_map_", {}).items()}
        return [*bases, *((f".{name}", member) for name, member in members.items())]
    found: list[Part] = []
    for name, item in inside.items():
        special = name.startswith("__") and name.endswith("__")
        if (
            isinstance(item, _NO_ATTRIBUTES)
            or (special and not isinstance(item, _CALLED))
            or name == "_abc_impl"
        ):
            continue
        found.append((f".{name}", item))
    return [*bases, *found]


def _module(value: types.ModuleType) -> Iterable[Part]:
    """Return the names in a file of the user's that was imported."""
    inside = object.__getattribute__(value, "__dict__")
    name = inside.get("__name__")
    if not isinstance(name, str) or name == "__main__" or not is_users_module(name):
        return ()
    return [(f".{key}", item) for key, item in inside.items() if not key.startswith("__")]


def _mapping(value: Any) -> Iterable[Part]:
    found: list[Part] = []
    for key, item in dict.items(value):
        step = f"[{_key(key)}]"
        found.append((step, item))
        if not _is_exact(type(key)) and type(key) is not tuple:
            found.append((f"{step} (key)", key))
    return found


def _ordered(value: Any) -> Iterable[Part]:
    order = ", ".join(_key(key) for key in dict.keys(value))
    return [*_mapping(value), *([(" (order)", order)] if dict.__len__(value) > 1 else [])]


def _defaults(value: Any) -> Iterable[Part]:
    return [*_mapping(value), (".default_factory", _member(defaultdict, "default_factory", value))]


def _member(cls: type, name: str, value: Any) -> Any:
    """Return the value of a built-in class's member, also if a subclass of the user's overrides it."""
    return cls.__dict__[name].__get__(value)


def _key(key: Any) -> str:
    if is_scalar(key):
        data, text = content(key)
        # Keys whose shown beginnings are equal must stay two keys.
        return text if len(data) <= LONGEST // 2 else f"{text}#{fingerprint(data).hex()[:6]}"
    if type(key) is tuple:
        return f"({', '.join(map(_key, key))})"
    return f"<{type_name(type(key))}>"


def _is_exact(kind: type) -> bool:
    """Return whether a leaf is all there is to values of this type: there is nothing :func:`beside`."""
    return kind in SCALAR_TYPES or framework_of(kind) is not None or module_of(kind) == "datetime"


def _sequence(value: Any) -> Parts:
    items = list(_iterate(value))
    if len(items) > LONG and all(map(_is_exact, set(map(type, items)))):
        return Long(items)
    return [(f"[{number}]", item) for number, item in enumerate(items)]


def _deque(value: Any) -> Iterable[Part]:
    found = _sequence(value)
    items = [("", found.items)] if isinstance(found, Long) else list(found or ())
    return [*items, (".maxlen", _member(deque, "maxlen", value))]


def _iterate(value: Any) -> Iterable[Any]:
    """Return the items, also if a subclass of the user's overrides the iteration."""
    kind = type(value)  # isinstance can call code of the value
    if issubclass(kind, list):
        return list.__iter__(value)
    return tuple.__iter__(value) if issubclass(kind, tuple) else deque.__iter__(value)


def _set(value: Any) -> Parts:
    items = list(set.__iter__(value) if issubclass(type(value), set) else frozenset.__iter__(value))
    if all(_is_exact(type(item)) for item in items):
        # Sorted by content: a set has no order that ranks share, as each process has its own hashes of texts.
        return Long(sorted(fingerprint(type_name(type(item)).encode(), content(item)[0]) for item in items))
    # In an order that all ranks have, as far as the text of the items gives one.
    return [(f"{{{number}}}", item) for number, item in enumerate(sorted(items, key=_key))]


def _memory(value: memoryview) -> Iterable[Part]:
    return [(".format", value.format), (".shape", value.shape), (".bytes", value.tobytes())]


def _partial(value: Any) -> Iterable[Part]:
    return [(f".{name}", _member(functools.partial, name, value)) for name in ("func", "args", "keywords")]


def _underlying(value: Any) -> Iterable[Part]:
    import gc

    return [("", held) for held in gc.get_referents(value)[:1]]


_KINDS: dict[type, Callable[[Any], Any]] = {
    OrderedDict: _ordered,
    defaultdict: _defaults,
    dict: _mapping,
    list: _sequence,
    tuple: _sequence,
    deque: _deque,
    set: _set,
    frozenset: _set,
    memoryview: _memory,
    functools.partial: _partial,
    types.MappingProxyType: _underlying,
    weakref.ref: lambda value: [("()", weakref.ref.__call__(value))],
    staticmethod: lambda value: [(".__func__", value.__func__)],
    classmethod: lambda value: [(".__func__", value.__func__)],
    property: lambda value: [(f".{name}", getattr(value, name)) for name in ("fget", "fset", "fdel")],
    functools.cached_property: lambda value: [(".func", value.func)],
}

# Derived from a built-in class, with nothing added that could differ.
_COMPLETE: frozenset[type] = frozenset({defaultdict, OrderedDict})

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
    """Return whether :func:`content` knows this value."""
    return is_scalar_type(type(value))


def is_scalar_type(kind: type) -> bool:
    """Return whether :func:`content` knows values of this type."""
    return (
        issubclass(kind, tuple(_PLAIN))
        or kind in _CONSTANTS
        or issubclass(kind, (*_FUNCTIONS, types.CodeType, Enum))
        or kind.__module__.partition(".")[0] in _PICKLED
        or framework_of(kind) is not None
    )


def framework_of(kind: type) -> FrameworkHooks | None:
    """Return the hooks that know values of this type; None if no loaded framework does."""
    return next((hooks for hooks in loaded() if hooks.is_plain(kind)), None)


def content(value: Any) -> tuple[bytes, str]:
    """Return the number of bytes that are equal for equal values of a type, and the value in words. Only if :func:`is_scalar` is True."""
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
    """Return the built-in value that an instance of a user's subclass is, without calling code of that class."""
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
    """Return a fingerprint of a constant of code: a set has no order, and the repr of a code object has an address in it."""
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
    # By its bits: NaN does not differ from itself, and 0.0 differs from -0.0.
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


MOST_LEAVES = 20_000
"""Leaves of one value, at most; further ones are counted."""
DEEPEST = 60
"""Levels of a value below which its parts are not visited."""
FINGERPRINTS = "items"
"""In place of a dtype, for a long list of values that are no numbers: its elements are fingerprints."""


@dataclass(slots=True)
class Found:
    """Leaf, on the rank that has it.

    Attributes:
        path, kind, type: As in :class:`~hvdlab.kernel_ext.wire.compare.Leaf`.
        content: The bytes from which a value's fingerprint is made.
        text: The value, shortened.
        array: The elements, if it is an array.
        value: The object that has the elements.
        long: A text that is too long to be shown, to be compared character by character, as :func:`long_text` returns it.
    """

    path: str
    kind: str
    type: str
    content: bytes = b""
    text: str = ""
    array: ArraySource | None = None
    value: Any = None
    long: tuple[str, str | bytes] | None = None


@dataclass(slots=True)
class Leaves:
    """All leaves of a value, in the order in which they are met; ``left_out`` counts parts that are not among them."""

    found: list[Found] = field(default_factory=list)
    left_out: int = 0


def leaves_of(value: Any, most: int = MOST_LEAVES) -> Leaves:
    """Take a value apart, into ``most`` leaves. Never raises an ``Exception``: a part that can't be read is a leaf, too."""
    walk = _Walk(most)
    walk.visit("", value, 0)
    return walk.leaves


def _count(parts: Sequence[Any]) -> str:
    return "1 part" if len(parts) == 1 else f"{len(parts)} parts"


class _Walk:
    def __init__(self, most: int) -> None:
        self.leaves = Leaves()
        self._most = most
        #: Where each object was met first: whether two parts are one object can differ between ranks, too.
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps objects alive, else another one could get the same id()

    def visit(self, path: str, value: Any, depth: int) -> None:
        if len(self.leaves.found) >= self._most or depth > DEEPEST:
            self.leaves.left_out += 1
            return
        try:
            self._visit(path, value, depth)
        except Exception as error:  # noqa: BLE001  # a framework may raise anything about what it can't do
            self._add(Found(path, "error", type_name(type(value)), text=one_line(error)))

    def _visit(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if is_scalar(value):
            data, text = content(value)
            self._add(Found(path, "value", type_name(kind), data, text, long=long_text(value)))
            self._beside(path, value, beside(value), depth)
            return
        if kind is Unknown:
            self._add(Found(path, "opaque", type_name(value.kind)))
            return
        if (before := self._seen.get(id(value))) is not None:
            same = f"the same object as {before or 'the whole'}"
            self._add(Found(path, "value", type_name(kind), same.encode(), same))
            return
        self._remember(path, value)
        if (source := array_source(value)) is not None:
            self._add(Found(path, "array", type_name(kind), array=source, value=value))
            for hooks in loaded():
                self._each(path, hooks.beside(value), depth)
            if not any(hooks.is_all_elements(kind) for hooks in loaded()):
                self._each(path, attributes(value) or (), depth)
        elif (parts := parts_of(value)) is not None:
            self._inside(path, value, parts, depth)
        else:
            self._add(Found(path, "opaque", type_name(kind)))
        if is_users_module(kind.__module__) and id(kind) not in self._seen:
            self.visit(f"{path}.__class__", kind, depth + 1)  # a class's attributes are its objects' as well

    def _beside(self, path: str, value: Any, parts: Iterable[Part], depth: int) -> None:
        """Visit the parts of a value that is a leaf itself; only once, as there are functions that call themselves."""
        found = list(parts)
        if id(value) in self._seen or not (found or isinstance(value, type)):
            return
        self._remember(path, value)
        self._each(path, found, depth)

    def _remember(self, path: str, value: Any) -> None:
        self._seen[id(value)] = path
        self._kept.append(value)

    def _inside(self, path: str, value: Any, parts: Parts, depth: int) -> None:
        if isinstance(parts, Long):
            self._add(Found(path, "array", type_name(type(value)), array=_long(parts.items)))
            return
        # A leaf of its own, so that empty containers, and a list and a tuple, can differ. The number of parts is not in its
        # content: the parts' own leaves show that.
        self._add(Found(path, "value", type_name(type(value)), b"", _count(parts := list(parts or ()))))
        self._each(path, parts, depth)

    def _each(self, path: str, parts: Iterable[Part], depth: int) -> None:
        for step, part in parts:
            self.visit(path + step, part, depth + 1)

    def _add(self, found: Found) -> None:
        self.leaves.found.append(found)


def _long(items: list[Any]) -> ArraySource:
    """Items as an array: numbers as numbers, others as fingerprints."""
    kinds = {type(item) for item in items}
    if kinds <= {float} or kinds <= {bool} or kinds <= {int}:
        array = np.array(items) if items else np.empty(0)
        if not array.dtype.hasobject:
            return numpy_source(array)
    rows = b"".join(fingerprint(type(item).__name__.encode(), content(item)[0]) for item in items)
    raw = np.frombuffer(rows, np.uint8)
    return ArraySource(
        FINGERPRINTS,
        (len(items),),
        "cpu",
        None,
        raw.nbytes,
        SIZE,
        lambda offset, length: raw[offset : offset + length],
    )

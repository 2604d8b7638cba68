"""Parts of a value, each with the step that leads to it.

A value's parts are everything in which two such values could differ. What can't be had (the inside of a C extension's object
that pickle does not get either) is a part, too: one that is :class:`Unknown`.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hvdlab.bindings.framework_hooks import NotOurs, Part, loaded, module_of
from hvdlab.collectives.fingerprint import fingerprint
from hvdlab.kernel_ext.inspect.scalars import (
    LONGEST,
    SCALAR_TYPES,
    content,
    framework_of,
    is_scalar,
    type_name,
)

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
    """The parts of a value; None if it has none that can be had, and may differ all the same."""
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
    """The parts of a value that has a leaf of its own, besides what that leaf compares.

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
    """Whether objects of a type have more inside than their ``__dict__`` and slots: C code put it there.

    Python's classes add to the size of objects what their slots need, and nothing else.
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
    """The parts of an object of a C extension: what it gives to pickle, unless code of the user's would give it."""
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
    """Whether a type has its own way to be pickled, and that is not code of the user's."""
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
    """Name and value of what is in an object's ``__dict__`` and slots; None if it has neither."""
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
    """Whether a module is the notebook or a file of the user's: neither Python's, nor ours, nor installed."""
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
    """Bases and attributes of a class of the user's; what Python itself keeps there has underscores around it."""
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
    """The names in a file of the user's that was imported."""
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
    """The value of a built-in class's member, whatever a subclass of the user's says."""
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
    """Whether a leaf is all there is to values of this type: there is nothing :func:`beside`."""
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
    """The items, whatever a subclass of the user's says they are."""
    kind = type(value)  # isinstance may ask the value
    if issubclass(kind, list):
        return list.__iter__(value)
    return tuple.__iter__(value) if issubclass(kind, tuple) else deque.__iter__(value)


def _set(value: Any) -> Parts:
    items = list(set.__iter__(value) if issubclass(type(value), set) else frozenset.__iter__(value))
    if all(_is_exact(type(item)) for item in items):
        return Long(sorted(fingerprint(type_name(type(item)).encode(), content(item)[0]) for item in items))
    # In an order that all ranks have, as far as what is shown of the items gives one.
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

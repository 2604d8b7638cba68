"""A value taken apart into its leaves: numbers, texts and arrays, each with a path.

No code of the user's runs here, other than what frameworks call: containers are read as what they are built on, objects
by their ``__dict__``, and nothing is printed by its own ``__repr__``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlab.collectives.fingerprint import SIZE, fingerprint
from hvdlab.kernel_ext.inspect.arrays import ArraySource, array_source
from hvdlab.kernel_ext.inspect.scalars import content, is_scalar, is_scalar_type, type_name
from hvdlab.kernel_ext.rank.failures import one_line

MOST_LEAVES = 20_000
DEEPEST = 60
LONG = 64
"""Items from which a list is compared as one array."""

FINGERPRINTS = "items"
"""What stands for the dtype of a long list of anything: its elements are fingerprints."""

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


@dataclass(slots=True)
class Found:
    """A leaf, on the rank that has it.

    Attributes:
        path, kind, type: As in :class:`~hvdlab.kernel_ext.inspect.messages.Leaf`.
        content: What a value's fingerprint is made of.
        text: The value, shortened.
        array: The elements, if it is an array.
        value: What has them.
    """

    path: str
    kind: str
    type: str
    content: bytes = b""
    text: str = ""
    array: ArraySource | None = None
    value: Any = None


@dataclass(slots=True)
class Leaves:
    """All leaves of a value, in the order in which they are met; ``left_out`` counts parts that are not among them."""

    found: list[Found] = field(default_factory=list)
    left_out: int = 0


def leaves_of(value: Any, most: int = MOST_LEAVES) -> Leaves:
    """Take a value apart, into ``most`` leaves. Never raises an ``Exception``: what can't be looked at is a leaf, too."""
    walk = _Walk(most)
    walk.visit("", value, 0)
    return walk.leaves


def _count(parts: Sequence[Any]) -> str:
    return "1 part" if len(parts) == 1 else f"{len(parts)} parts"


class _Walk:
    def __init__(self, most: int) -> None:
        self.leaves = Leaves()
        self._most = most
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # or another object could get the same identity

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
            self._add(Found(path, "value", type_name(kind), data, text))
            return
        if (before := self._seen.get(id(value))) is not None:
            same = f"the same object as {before or 'the whole'}"
            self._add(Found(path, "value", type_name(kind), same.encode(), same))
            return
        self._seen[id(value)] = path
        self._kept.append(value)
        if (source := array_source(value)) is not None:
            self._add(Found(path, "array", type_name(kind), array=source, value=value))
        elif (parts := parts_of(value)) is not None:
            self._inside(path, value, parts, depth)
        else:
            self._add(Found(path, "opaque", type_name(kind)))

    def _inside(self, path: str, value: Any, parts: Iterable[tuple[str, Any]] | Long, depth: int) -> None:
        if isinstance(parts, Long):
            self._add(Found(path, "array", type_name(type(value)), array=_long(parts.items)))
            return
        # Also of something empty there is a leaf, and a list is not a tuple. How many parts there are is told by them.
        self._add(Found(path, "value", type_name(type(value)), b"", _count(parts := list(parts))))
        for step, part in parts:
            self.visit(path + step, part, depth + 1)

    def _add(self, found: Found) -> None:
        self.leaves.found.append(found)


@dataclass(frozen=True, slots=True)
class Long:
    """A list that is too long for a leaf for each item."""

    items: list[Any]


Parts = Iterable[tuple[str, Any]] | Long | None


def parts_of(value: Any) -> Parts:
    """The parts of a value with their steps; None if it has none that can be had."""
    kind = type(value)
    for applies, take in _KINDS:
        if applies(kind):
            return take(value)
    if kind.__module__.partition(".")[0] in _OPAQUE or issubclass(kind, type):
        return None
    return _attributes(value)


def _attributes(value: Any) -> Iterable[tuple[str, Any]] | None:
    found: dict[str, Any] = {}
    names = list(_slots(type(value)))
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


def _slots(kind: type) -> Iterable[str]:
    for cls in kind.__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                # Two underscores in front stand for the class's name, too.
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{cls.__name__.lstrip('_')}{name}" if private else name


def _mapping(value: Any) -> Iterable[tuple[str, Any]]:
    return [(f"[{_key(key)}]", item) for key, item in dict.items(value)]


def _key(key: Any) -> str:
    if is_scalar(key):
        return content(key)[1]
    if type(key) is tuple:
        return f"({', '.join(map(_key, key))})"
    return f"<{type_name(type(key))}>"


def _sequence(value: Any) -> Parts:
    items = list(_iterate(value))
    if len(items) > LONG and all(map(is_scalar_type, set(map(type, items)))):
        return Long(items)
    return [(f"[{number}]", item) for number, item in enumerate(items)]


def _iterate(value: Any) -> Iterable[Any]:
    """The items, whatever a subclass of the user's says they are."""
    kind = type(value)  # isinstance may ask the value
    if issubclass(kind, list):
        return list.__iter__(value)
    return tuple.__iter__(value) if issubclass(kind, tuple) else deque.__iter__(value)


def _set(value: Any) -> Parts:
    items = list(set.__iter__(value) if issubclass(type(value), set) else frozenset.__iter__(value))
    return Long(sorted(fingerprint(_whole(item)) for item in items))


def _whole(value: Any) -> bytes:
    """All of a small value, in bytes."""
    return b"".join(
        fingerprint(leaf.path.encode(), leaf.type.encode(), leaf.content) for leaf in leaves_of(value).found
    )


def _long(items: list[Any]) -> ArraySource:
    """Items as an array: numbers as numbers, others as fingerprints."""
    kinds = {type(item) for item in items}
    if kinds <= {float} or kinds <= {bool} or kinds <= {int}:
        array = np.array(items) if items else np.empty(0)
        if not array.dtype.hasobject:
            source = array_source(array)
            assert source is not None
            return source
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


def _object_array(value: Any) -> Parts:
    return _sequence(value.reshape(-1).tolist())


def _module(value: Any) -> Iterable[tuple[str, Any]]:
    """Parameters and buffers under the names that ``state_dict`` has, then the other modules, then settings."""
    inside = object.__getattribute__(value, "__dict__")
    held: list[tuple[str, Any]] = []
    for group in ("_parameters", "_buffers", "_modules"):
        held += [
            (f".{name}", item) for name, item in dict(inside.get(group) or {}).items() if item is not None
        ]
    settings = [(f".{name}", item) for name, item in inside.items() if not name.startswith("_")]
    return held + settings


def _optimizer(value: Any) -> Iterable[tuple[str, Any]]:
    """Settings of the groups, then the state of each parameter, by its number."""
    groups = value.param_groups
    settings = [
        (f".param_groups[{number}][{key!r}]", item)
        for number, group in enumerate(groups)
        for key, item in group.items()
        if key != "params"
    ]
    parameters = [parameter for group in groups for parameter in group["params"]]
    states = [
        (f".state[{number}]", value.state[p]) for number, p in enumerate(parameters) if p in value.state
    ]
    return [*settings, *states]


def _sparse(value: Any) -> Iterable[tuple[str, Any]] | None:
    torch = sys.modules["torch"]
    if value.layout is torch.sparse_coo:
        plain = value.detach().coalesce()
        return [(".shape", tuple(value.shape)), (".indices", plain.indices()), (".values", plain.values())]
    return None


def _table(value: Any) -> Iterable[tuple[str, Any]]:
    """A pandas table or column: its labels and its data."""
    if type(value).__name__ == "DataFrame":
        columns = [(f"[{name!r}]", value.iloc[:, n].to_numpy()) for n, name in enumerate(value.columns)]
        return [(".index", value.index.to_numpy()), *columns]
    if type(value).__name__ == "Series":
        return [(".index", value.index.to_numpy()), (".values", value.to_numpy())]
    return [(".values", value.to_numpy())]


def _is(module: str, name: str) -> Callable[[type], bool]:
    """Whether a class comes from ``module.name``, if that has been imported."""

    def applies(kind: type) -> bool:
        base = getattr(sys.modules.get(module), name, None)
        return isinstance(base, type) and issubclass(kind, base)

    return applies


_KINDS: list[tuple[Callable[[type], bool], Callable[[Any], Parts]]] = [
    (lambda kind: issubclass(kind, dict), _mapping),
    (lambda kind: issubclass(kind, (list, tuple, deque)), _sequence),
    (lambda kind: issubclass(kind, (set, frozenset)), _set),
    (lambda kind: issubclass(kind, np.ndarray), _object_array),
    (_is("torch.nn", "Module"), _module),
    (_is("torch.optim", "Optimizer"), _optimizer),
    (_is("torch", "Tensor"), _sparse),
    (_is("torch", "Generator"), lambda value: [(".state", value.get_state())]),
    (_is("numpy.random", "Generator"), lambda value: [(".state", value.bit_generator.state)]),
    (_is("numpy.random", "RandomState"), lambda value: [(".state", value.get_state(legacy=False))]),
    (_is("random", "Random"), lambda value: [(".state", value.getstate())]),
    (_is("pandas", "DataFrame"), _table),
    (_is("pandas", "Series"), _table),
    (_is("pandas", "Index"), _table),
]

"""A value taken apart into its leaves: numbers, texts and arrays, each with a path.

No code of the user's runs here, other than what frameworks call: containers are read by the built-in types that they derive
from, objects by their ``__dict__``, and nothing is printed by its own ``__repr__``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlab.bindings.array_source import ArraySource, numpy_source
from hvdlab.bindings.framework_hooks import Part, loaded
from hvdlab.collectives.fingerprint import SIZE, fingerprint
from hvdlab.kernel_ext.inspect.arrays import array_source
from hvdlab.kernel_ext.inspect.parts import (
    Long,
    Parts,
    Unknown,
    attributes,
    beside,
    is_users_module,
    parts_of,
)
from hvdlab.kernel_ext.inspect.scalars import content, is_scalar, long_text, type_name
from hvdlab.kernel_ext.rank.errors import one_line

MOST_LEAVES = 20_000
DEEPEST = 60
FINGERPRINTS = "items"
"""In place of a dtype, for a long list of values that are no numbers: its elements are fingerprints."""


@dataclass(slots=True)
class Found:
    """A leaf, on the rank that has it.

    Attributes:
        path, kind, type: As in :class:`~hvdlab.kernel_ext.wire.compare.Leaf`.
        content: What a value's fingerprint is made of.
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
        """Visit what belongs to a value that is a leaf itself; only once, as there are functions that call themselves."""
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

"""Kinds of values that a variable may hold: how a text becomes one, and how that is said in words."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Value = bool | int | float | str | tuple[int, ...] | tuple[str, ...]

_YES = frozenset(("1", "true", "yes", "on"))
_NO = frozenset(("0", "false", "no", "off"))
LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}
"""Horovod's levels as those of ``logging``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        unit: For the table in the documentation.
        expected: What was expected, for the error text.
        parse: Raises ``ValueError`` for what is no such value.
        absent: Words, in lower case, that are no values, though one may expect them; why they are not, and what to do instead.
    """

    unit: str
    expected: str
    parse: Callable[[str], Value]
    absent: Mapping[str, str] = field(default_factory=dict)


def _flag(text: str) -> bool:
    text = text.lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    return int(text) > 0


def _number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(text)
        return value

    return parse


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return parse


def _milliseconds(text: str) -> float:
    return _number(0.0)(text) / 1000


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_whole(0)(piece) for piece in text.split(","))


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(piece.strip() for piece in text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(text)
    return names


def _encryption(text: str) -> str:
    if text.lower() in _NO:
        return ""
    if text.lower() in _YES:
        return "1"
    return ",".join(str(ipaddress.ip_network(piece.strip(), strict=False)) for piece in text.split(","))


def _level(text: str) -> int:
    try:
        return LEVELS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


FLAG = Kind("0 or 1", "0 or 1", _flag)
BYTES = Kind("bytes", "a whole number of bytes from 0", _whole(0))
COUNT = Kind("number", "a whole number from 0", _whole(0))
POSITIVE = Kind("number", "a whole number from 1", _whole(1))
SECONDS = Kind("s", "a number of seconds from 0", _number(0.0))
MILLISECONDS = Kind("ms", "a number of milliseconds from 0", _milliseconds)
FRACTION = Kind("number", "a number from 0", _number(0.0))
CORES = Kind("core numbers", "core numbers with commas between them", _cores)
LEVEL = Kind("level", f"one of {', '.join(LEVELS)}", _level)
ENCRYPTION = Kind(
    "0, 1 or networks", "0, 1, or networks such as 10.8.0.0/24 with commas between them", _encryption
)
MODULES = Kind("modules", "names of modules with commas between them", _modules)
TEXT = Kind("text", "a text", str)
FILE = Kind("file", "a file name", str)


def choice(*words: str, absent: Mapping[str, str] | None = None) -> Kind:
    """One of a few words; see :class:`Kind` for ``absent``."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return Kind("name", f"one of {', '.join(words)}", parse, absent or {})

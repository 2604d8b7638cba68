"""Options that only one launcher has: ``--launcher-option key=value``.

Example:
    >>> from hvdlab.launch.options import split
    >>> split(["nice=5", "queue=long"])
    {'nice': '5', 'queue': 'long'}
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hvdlab.collectives.errors import InvalidRequestError


class OptionKind(Enum):
    """Kind of an option's text; the value names the expected text in an error."""

    TEXT = "a text"
    COUNT = "a whole number"
    SWITCH = "yes or no"
    WORDS = "words, as a shell would split them"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a launcher.

    Attributes:
        name: Its name, as in ``name=value``.
        help: Its purpose, in one line.
        kind: How its text is read: as ``str``, ``int``, ``bool`` or ``tuple[str, ...]``.
    """

    name: str
    help: str
    kind: OptionKind = OptionKind.TEXT

    def read(self, text: str) -> str | int | bool | tuple[str, ...]:
        """Return the value of a text. Raises ``ValueError`` or ``KeyError`` if it has none."""
        match self.kind:
            case OptionKind.TEXT:
                return text
            case OptionKind.COUNT:
                return int(text)
            case OptionKind.WORDS:
                return tuple(shlex.split(text))
            case OptionKind.SWITCH:
                return {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}[
                    text.lower()
                ]


def split(texts: Iterable[str]) -> dict[str, str]:
    """Return ``["a=1", "b=2"]`` as ``{"a": "1", "b": "2"}``; the last of a name counts.

    Args:
        texts: Options as a user wrote them, ``name=value`` each.

    Raises:
        InvalidRequestError: One of them is not of this form.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise InvalidRequestError(f"--launcher-option {text}: write it as key=value.")
        found[name.strip()] = value
    return found


def parse(launcher: str, known: Sequence[Option], given: Mapping[str, str]) -> dict[str, object]:
    """Return the values of a launcher's options.

    Args:
        launcher: Its name.
        known: The options that it accepts.
        given: Texts by name. ``-`` and ``_`` in names are the same.

    Raises:
        InvalidRequestError: The launcher has no such option, or a value is not understood. The text names the options.
    """
    by_name = {option.name: option for option in known}
    values: dict[str, object] = {}
    for name, text in given.items():
        option = by_name.get(name.replace("-", "_"))
        if option is None:
            names = ", ".join(f"`{each.name}`" for each in known)
            takes = f"it takes {names}" if names else "it takes none"
            raise InvalidRequestError(f"the launcher `{launcher}` has no option `{name}`; {takes}.")
        try:
            values[option.name] = option.read(text)
        except (ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the option `{name}` of the launcher `{launcher}` is to be {option.kind.value}, not {text!r}."
            ) from error
    return values

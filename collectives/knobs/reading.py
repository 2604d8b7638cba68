"""From the environment to values."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.knobs.kinds import Value
from hvdlab.collectives.knobs.table import KNOBS, Reader


def read(environ: Mapping[str, str]) -> dict[str, Value]:
    """The value of each variable of the table that is set, by variable. An empty text counts as unset.

    Raises:
        InvalidRequestError: Some hold what they should not; one error names them all.
    """
    values: dict[str, Value] = {}
    wrong = []
    for knob in KNOBS:
        text = environ.get(knob.variable, "").strip()
        if not text:
            continue
        try:
            values[knob.variable] = knob.kind.parse(text)
        except ValueError:
            why = knob.kind.absent.get(text.lower())
            reason = f"{why}; " if why else ""
            wrong.append(f"{knob.variable}={text!r}: {reason}{knob.kind.expected} was expected")
    if wrong:
        raise InvalidRequestError("; ".join(wrong) + ".")
    return values


def for_reader(reader: Reader, environ: Mapping[str, str]) -> dict[str, Value]:
    """The values that ``reader`` takes, by field; of two variables for one field the first in the table wins.

    Raises:
        InvalidRequestError: A variable of the table, this reader's or not, holds what it should not.
    """
    values = read(environ)
    fields: dict[str, Value] = {}
    for knob in KNOBS:
        if knob.reader in (reader, Reader.BOTH) and knob.field and knob.variable in values:
            fields.setdefault(knob.field, values[knob.variable])
    return fields

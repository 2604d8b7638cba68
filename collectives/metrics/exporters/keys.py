"""Names of a rank's metrics in trackers that know no ranks."""

from __future__ import annotations

from collections.abc import Callable

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.points import Point

BY_RANK = "{name}/rank{rank}"


def key_of(pattern: str) -> Callable[[Point], str]:
    """A function that fills ``pattern`` in, as ``str.format`` does, with ``name`` and ``rank``.

    Raises:
        InvalidRequestError: It has other fields.
    """
    try:
        pattern.format(name="loss", rank=0)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"key={pattern!r} may have {{name}} and {{rank}} in it: {error!r}"
        ) from None
    return lambda point: pattern.format(name=point.name, rank=point.rank)

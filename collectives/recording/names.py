"""Numbers for the texts that batches define, each batch anew: what was read once is not read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.recording.rows import Rows
from hvdlab.collectives.tracing.record_format import Definitions, Head

NAMES_KEPT = 65_536
OTHER_NAMES = "(another name)"
DEFINITIONS_KEPT = 256
"""Tables of definitions that are remembered: a few for each rank, since the steps of a training are alike."""


@dataclass(slots=True)
class _Known:
    """Numbers of a rank's in a table of definitions that spans have used, in order; what each is here, and for matching."""

    idents: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    matched: NDArray[np.uint32]


class Names:
    """Names and call sites by number, each pair once.

    Attributes:
        names, sites: Texts by number; 0 is the empty one. A name may have several numbers, one for each of its sites.
        definitions: Tables of definitions that were read, for ``read_head``.
    """

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.sites: list[str] = [""]
        self.definitions = Definitions(DEFINITIONS_KEPT)
        self._numbers: dict[tuple[str, str], int] = {("", ""): 0}
        self._matched: dict[str, int] = {"": 0}  # a number for each name, whatever its sites
        self._known: dict[int, tuple[dict[int, str], _Known]] = {}

    def assign(self, rows: Rows, head: Head) -> NDArray[Any]:
        """Replace the numbers of a batch by those here; returns one for each row's name, whatever its site.

        Raises:
            ProtocolError: A row has a name that its batch does not define.
        """
        idents = rows["name"].astype(np.uint32)
        # Tables that are read again are the same object, which is kept here so that its id stays its own.
        entry = self._known.get(id(head.names))
        at = None if entry is None else _places(entry[1].idents, idents)
        if entry is None or at is None:
            known = self._learn(head, idents, entry[1].idents if entry is not None else idents[:0])
            at = np.searchsorted(known.idents, idents)
        else:
            known = entry[1]
        rows["name"] = known.numbers[at]
        found: NDArray[Any] = known.matched[at]
        return found

    def _learn(self, head: Head, idents: NDArray[np.uint32], before: NDArray[np.uint32]) -> _Known:
        used = np.union1d(idents, before)
        if missing := set(used.tolist()) - set(head.names):
            raise ProtocolError(f"event batch: name {min(missing)} is not defined")
        numbers = [self._number(head.names[one], head.sites[one]) for one in used.tolist()]
        matched = [self._matched[self.names[number]] for number in numbers]
        found = _Known(used, np.array(numbers, np.uint32), np.array(matched, np.uint32))
        self._known[id(head.names)] = (head.names, found)
        if len(self._known) > DEFINITIONS_KEPT:
            del self._known[next(iter(self._known))]
        return found

    def _number(self, name: str, site: str) -> int:
        number = self._numbers.get((name, site))
        if number is not None:
            return number
        if len(self._numbers) >= NAMES_KEPT:
            name, site = OTHER_NAMES, ""
        if (name, site) not in self._numbers:
            number = self._numbers[name, site] = len(self.names)
            self._matched.setdefault(name, number)
            self.sites.append(site)  # first, so that a thread that has seen a name finds its site
            self.names.append(name)
        return self._numbers[name, site]


def _places(known: NDArray[np.uint32], idents: NDArray[np.uint32]) -> NDArray[np.intp] | None:
    """Where each is in the order of those that are known; ``None`` if one is not."""
    at: NDArray[np.intp] = np.searchsorted(known, idents)
    np.minimum(at, len(known) - 1, out=at)
    return at if np.array_equal(known[at], idents) else None

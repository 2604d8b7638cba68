"""What ranks must have alike to work together: they send each other functions and objects, and compute the same."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

COMPARED = ("hvdlab", "torch")
"""Modules whose versions are compared, where a rank has loaded them."""


def own_versions() -> dict[str, str]:
    """The versions of this process: of Python ``3.11`` without its last part, of modules without that of their build (``+cpu``)."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in COMPARED:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version).partition("+")[0]
    return found


class AgreedVersions:
    """The versions of the ranks that are there.

    Each of them was let in because it has what the others have. So a newcomer need not be compared with every one of them: a world
    of n ranks takes n comparisons to come about.
    """

    def __init__(self) -> None:
        #: How many ranks have said that they have this version, by name and version. One version of each name is there.
        self._having: Counter[tuple[str, str]] = Counter()
        self._agreed: dict[str, str] = {}

    def add(self, versions: Mapping[str, str]) -> None:
        """A rank was let in."""
        self._having.update(versions.items())
        self._agreed.update(versions)

    def remove(self, versions: Mapping[str, str]) -> None:
        """A rank is gone."""
        for name, version in versions.items():
            self._having[name, version] -= 1
            if not self._having[name, version]:
                del self._having[name, version], self._agreed[name]

    def fit(self, versions: Mapping[str, str]) -> bool:
        """Whether these are the versions of all ranks that are there, as far as both have said them."""
        return all(self._agreed.get(name, version) == version for name, version in versions.items())


def refusal(rank: int, versions: Mapping[str, str], others: Iterable[tuple[str, Mapping[str, str]]]) -> str:
    """Why a rank may not join these, or an empty text.

    Args:
        rank: Number of the newcomer.
        versions: Its versions, by name; a name that is not among them is not compared.
        others: Name, such as ``rank 0``, and versions of each peer that is there.
    """
    for other, theirs in others:
        for name, version in versions.items():
            if theirs.get(name, version) != version:
                return (
                    f"rank {rank} has {name} {version}, but {other} has {name} {theirs[name]}; all ranks need the same, so "
                    f"install {name} {theirs[name]} where rank {rank} runs"
                )
    return ""

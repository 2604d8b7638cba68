"""What ranks must have alike to work together: they send each other functions and objects, and compute the same."""

from __future__ import annotations

import platform
import sys
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

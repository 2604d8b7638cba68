"""What the merger hands to a screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hvdlab.collectives.errors import compact_ranks
from hvdlab.kernel_ext.wire.cells import Display


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one stream, labels included; complete lines unless the cell runs on one rank only."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A rich display that these ranks made alike."""

    ranks: tuple[int, ...]
    display: Display


@dataclass(frozen=True, slots=True)
class Cleared:
    """These ranks called clear_output."""

    ranks: tuple[int, ...]
    wait: bool


@dataclass(frozen=True, slots=True)
class LiveLines:
    """The lines that are being written now (progress bars), which replace the last ones.

    Each comes with the ranks that have it, or with none if the cell runs on one rank only.
    """

    lines: tuple[tuple[tuple[int, ...], str], ...]

    def text(self) -> str:
        return "\n".join(label(ranks) + text for ranks, text in self.lines)


Piece = Text | Shown | Cleared | LiveLines


@lru_cache(maxsize=4096)
def label(ranks: tuple[int, ...]) -> str:
    """Return ``[0-2] ``, as it stands before each line; nothing for no ranks."""
    return f"[{compact_ranks(ranks)}] " if ranks else ""


def group_equal(texts: Sequence[tuple[int, str]]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Ranks by equal text, in the order in which the texts first occur."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return tuple((tuple(ranks), text) for text, ranks in groups.items())

"""Ranks that came later than the others, and what was brought to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.collectives.errors import compact_ranks, format_ranks
from hvdlab.collectives.visible import visible


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A rank that has nothing of what the cells before it came have made.

    Attributes:
        how: What started it: ``resize``, ``repair`` or ``restart``.
        when: Seconds since the epoch.
    """

    how: str
    when: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Synced:
    """What :meth:`hvdlab.kernel_ext.pool.Pool.sync` has done. Its ``str`` is a sentence for each part of it.

    Attributes:
        source: The rank that the values came from.
        ranks: The ranks that have them now.
        names: Variables that were brought, in the order in which they were made.
        modules: Names that modules were imported under.
        failed: Name of each variable or module that was not brought, and why.
        nbytes: Bytes that each rank got.
        seconds: How long it took.
    """

    source: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    failed: Mapping[str, str]
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        from hvdlab.kernel_ext.rank.values import (
            rough_size,
        )  # it imports cloudpickle, which a notebook does later

        has = "has" if len(self.ranks) == 1 else "have"
        variables = f"{len(self.names)} variable{'' if len(self.names) == 1 else 's'}"
        modules = f"{len(self.modules)} module{'' if len(self.modules) == 1 else 's'}"
        brought = f"{variables} and {modules}, {rough_size(self.nbytes)} in {self.seconds:.1f} s"
        lines = [f"{format_ranks(self.ranks)} {has} what rank {self.source} knows: {brought}"]
        lines += [f"not brought: {visible(name)} ({visible(reason)})" for name, reason in self.failed.items()]
        return "\n".join(lines)


def why_unknown(newcomers: Mapping[int, Newcomer], ranks: Sequence[int]) -> str:
    """Why a name is unknown on some of ``ranks``, if they came later, and what to do; empty if none of them did."""
    came = [rank for rank in ranks if rank in newcomers]
    if not came:
        return ""
    one = newcomers[came[0]]
    at = time.strftime("%H:%M:%S", time.localtime(one.when))
    has = "has" if len(came) == 1 else "have"
    them = "it" if len(came) == 1 else "them"
    return (
        f"{format_ranks(came)} came later, by {one.how} at {at}, and {has} nothing that earlier cells made; "
        f"`%hvd_pool sync {compact_ranks(came)}` brings {them} what the others know"
    )

"""What a rank that was started again lacks, compared with those that stayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hvdlab.collectives.errors import compact_ranks, format_ranks
from hvdlab.kernel_ext.wire.status import Names

MOST_VARIABLES = 12
MOST_MODULES = 6


def lacking(names: Mapping[int, Names], replaced: Sequence[int]) -> str:
    """``it lacks model, opt and the modules np, torch: `%hvd_pool sync 3` …``; empty if no other rank has variables.

    Args:
        names: Rank to its variables and modules, for ranks that answered.
        replaced: The ranks that are new.
    """
    stayed = [found for rank, found in sorted(names.items()) if rank not in replaced]
    new = [names[rank] for rank in replaced if rank in names]
    variables = _missing((one.variables for one in stayed), [one.variables for one in new])
    modules = _missing((one.modules for one in stayed), [one.modules for one in new])
    parts = [_listed(variables, MOST_VARIABLES)] if variables else []
    if modules:
        parts.append(f"the module{'s' if len(modules) > 1 else ''} {_listed(modules, MOST_MODULES)}")
    if not parts:
        return ""
    it, lack, them = ("it", "lacks", "it") if len(replaced) == 1 else ("they", "lack", "them")
    return (
        f"{it} {lack} {' and '.join(parts)}: `%hvd_pool sync {compact_ranks(replaced)}` brings {them} all that, as "
        f"`%%hvd_run --sync` does before its cell, or run your set-up cells on {them} with `%%hvd_rank {compact_ranks(replaced)}`"
    )


def back(names: Mapping[int, Names], replaced: Sequence[int], seconds: float) -> str:
    """``rank 3 is back (1.2 s); it lacks …``."""
    are = "is" if len(replaced) == 1 else "are"
    said = f"{format_ranks(replaced)} {are} back ({seconds:.1f} s)"
    lacks = lacking(names, replaced)
    return f"{said}; {lacks}" if lacks else said


def _missing(have: Iterable[Sequence[str]], new: Sequence[Sequence[str]]) -> list[str]:
    """The names that a rank which stayed has and a new one has not, in the order in which they were made."""
    everywhere = set.intersection(*(set(one) for one in new)) if new else set[str]()
    return list(dict.fromkeys(name for names in have for name in names if name not in everywhere))


def _listed(names: Sequence[str], most: int) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"

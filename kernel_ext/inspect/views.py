"""Ranks and their values as objects: ``pool.ranks[3].model.fc.weight`` describes a value, and does not move it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, overload

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, format_ranks
from hvdlab.collectives.text import visible, visible_lines
from hvdlab.kernel_ext.inspect.messages import View

if TYPE_CHECKING:
    from hvdlab.kernel_ext.inspect.looking import Looking


class Ranks(tuple[int, ...]):
    """The ranks of a pool, as numbers; an index is not a position but a rank, and gives a view of its variables."""

    _pool: Looking

    def __new__(cls, ranks: Iterable[int], pool: Looking) -> Self:
        made = super().__new__(cls, ranks)
        made._pool = pool
        return made

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...]]]:
        return tuple, (tuple(self),)  # a copy is just numbers

    @overload  # type: ignore[override]  # said above
    def __getitem__(self, index: SupportsIndex, /) -> RankView: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[int, ...]: ...
    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]  # as above
        self, index: SupportsIndex | slice, /
    ) -> RankView | tuple[int, ...]:
        if isinstance(index, slice):
            return super().__getitem__(index)
        rank = index.__index__()
        if rank not in self:
            raise IndexError(f"there is no rank {rank}; the pool has {format_ranks(self)}")
        return RankView(self._pool, rank)


class RankView:
    """A rank: its variables are attributes, or items; called with an expression it returns the view of that value.

    As an index or in a comparison it counts as the rank's number.
    """

    def __init__(self, pool: Looking, rank: int) -> None:
        self._pool, self._rank = pool, rank

    def __getattr__(self, name: str) -> ValueView:
        if name.startswith("_"):
            raise AttributeError(name)  # notebooks ask any object for such names
        return ValueView(self._pool, self._rank, name)

    def __getitem__(self, name: str) -> ValueView:
        return self(name)

    def __call__(self, expression: str) -> ValueView:
        return ValueView(self._pool, self._rank, expression)

    def __index__(self) -> int:
        return self._rank

    def __eq__(self, other: object) -> bool:
        return int(other) == self._rank if isinstance(other, (int, RankView)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rank)

    def __dir__(self) -> Iterable[str]:
        try:
            return self._names()
        except HvdlabError:  # the rank is gone; completion has nothing to offer
            return []

    def _names(self) -> list[str]:
        found = self._pool.names([self._rank]).get(self._rank)
        return list(found.variables) if found is not None else []

    def __repr__(self) -> str:
        try:
            names = [visible(name) for name in self._names()]
        except HvdlabError as error:
            return f"<rank {self._rank}: {error}>"
        more = f", … {len(names) - 10} more" if len(names) > 10 else ""
        return f"<rank {self._rank}: {', '.join(names[:10]) + more if names else 'no variables'}>"


class ValueView:
    """A value of a rank. Attributes and items are views in turn; :meth:`pull` brings the value itself here."""

    def __init__(self, pool: Looking, rank: int, expression: str) -> None:
        self._pool, self._rank, self._expression = pool, rank, expression

    def pull(self) -> Any:
        """The value itself, brought to this process. Raises ``LookupError`` as :meth:`Pool.pull` does."""
        return self._pool.pull(self._expression, [self._rank])[self._rank]

    def __getattr__(self, name: str) -> ValueView:
        if name.startswith("_"):
            raise AttributeError(name)
        return ValueView(self._pool, self._rank, f"{self._expression}.{name}")

    def __getitem__(self, key: object) -> ValueView:
        if not _plain(key):
            raise InvalidRequestError(
                f"an item of a value on a rank is chosen by a number, a text or a slice, not {type(key).__name__}"
            )
        return ValueView(self._pool, self._rank, f"({self._expression})[{key!r}]")

    def __dir__(self) -> Iterable[str]:
        found = self._pool.view(self._expression, [self._rank]).get(self._rank)
        return ["pull", *(found.names if found is not None else ())]

    def __repr__(self) -> str:
        found = self._pool.view(self._expression, [self._rank]).get(self._rank)
        return "\n".join(
            [f"rank {self._rank}: {visible(self._expression)}", *(f"  {line}" for line in lines_of(found))]
        )


def lines_of(view: View | None) -> Sequence[str]:
    """What a rank said about a value, as lines."""
    if view is None:
        return ["the rank does not answer"]
    if view.error:
        return [visible_lines(view.error)]
    return [
        *(visible_lines(line) for line in view.lines),
        *(["(a cell is running, so it may be changing)"] if view.cell else []),
    ]


def _plain(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_plain, key))
    if isinstance(key, slice):
        return all(map(_plain, (key.start, key.stop, key.step)))
    return key is None or key is Ellipsis or type(key) in (int, str, float, bool, bytes)

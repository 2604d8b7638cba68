"""Which display area of the notebook belongs to which display of which rank."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import count


class KnownAreas:
    """The areas of ranks' display ids in all cells of a notebook: a handle may be updated in a later cell than its own."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, str], str] = {}

    def get(self, rank: int, display_id: str) -> str | None:
        """The area that this rank's display id was given last; None if it has none."""
        return self._by_id.get((rank, display_id))

    def put(self, rank: int, display_id: str, area: str) -> None:
        """Give this rank's display id this area from now on."""
        self._by_id[rank, display_id] = area

    def drop(self, rank: int, display_id: str, area: str) -> None:
        """Forget this area, which is gone, unless the display id has another one by now."""
        if self._by_id.get((rank, display_id)) == area:
            del self._by_id[rank, display_id]

    def clear(self) -> None:
        """Forget all areas: the ranks are gone."""
        self._by_id.clear()


class Areas:
    """Names areas, and finds them again.

    Ranks choose display ids without knowing of each other, so each rank's id gets an area of its own. After a rank
    alone has cleared its output, its next displays take the areas of the cleared ones: a plot that is redrawn in a
    loop stays in its place while the other ranks' output stays untouched.

    Args:
        prefix: Prefix of the areas' names.
        known: The areas of all cells, which this one's are added to.
    """

    def __init__(self, prefix: str, known: KnownAreas | None = None) -> None:
        self._known = known or KnownAreas()
        self._names = (f"{prefix}-{n}" for n in count())
        self._by_id: dict[tuple[int, str], str] = {}
        self._used: defaultdict[int, list[str]] = defaultdict(list)
        self._free: defaultdict[int, deque[str]] = defaultdict(deque)

    def find(self, rank: int, display_id: str) -> str | None:
        """The area that an update goes to, or None if there is none."""
        return self._by_id.get((rank, display_id)) or self._known.get(rank, display_id)

    def place(self, ranks: tuple[int, ...], display_id: str) -> tuple[str, bool]:
        """An area for a display, and whether it exists already."""
        reuse = len(ranks) == 1 and bool(self._free[ranks[0]])
        area = self._free[ranks[0]].popleft() if reuse else next(self._names)
        for rank in ranks:
            if display_id:
                self._by_id[rank, display_id] = area
                self._known.put(rank, display_id, area)
            if len(ranks) == 1:
                self._used[rank].append(area)
        return area, reuse

    def clear(self, rank: int) -> list[str]:
        """A rank has cleared its output. Returns areas that an earlier clear freed and no display took."""
        stale = list(self._free[rank])
        self._free[rank] = deque(self._used.pop(rank, ()))
        return stale

    def free(self, rank: int) -> list[str]:
        """Areas that wait for the rank's next display."""
        return list(self._free[rank])

    def forget(self) -> None:
        """Forget all areas of this cell: its output is gone."""
        for (rank, display_id), area in self._by_id.items():
            self._known.drop(rank, display_id, area)
        self._by_id.clear()
        self._used.clear()
        self._free.clear()

    def leftover(self) -> list[str]:
        """Areas of all ranks that were freed and not taken again."""
        return [area for areas in self._free.values() for area in areas]

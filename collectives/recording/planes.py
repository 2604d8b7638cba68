"""Which data planes the ranks use, as they have recorded it: the user often asked for another one, or for ``auto``."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlab.collectives.tracing.record_format import Members


class Planes:
    """The plane of each process set on each of its ranks."""

    def __init__(self) -> None:
        self._planes: dict[int, dict[int, tuple[int, str]]] = {}  # rank, set: epoch and plane
        self._epochs: dict[int, int] = {}  # set: the newest epoch that any rank has told of

    def take(self, rank: int, news: Iterable[Members]) -> None:
        """Learn how process sets are configured on a rank."""
        for event in news:
            own = self._planes.setdefault(rank, {})
            if event.epoch < own.get(event.process_set, (0, ""))[0]:
                continue
            own[event.process_set] = event.epoch, event.plane
            self._epochs[event.process_set] = max(event.epoch, self._epochs.get(event.process_set, 0))

    def of(self, rank: int) -> dict[int, str]:
        """The planes by process set, for the sets that the rank is in; a set that goes on without it is left out."""
        planes = sorted(self._planes.get(rank, {}).items())
        return {
            number: plane
            for number, (epoch, plane) in planes
            if plane and (not number or epoch == self._epochs[number])
        }

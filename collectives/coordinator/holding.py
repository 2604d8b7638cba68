"""Holding ready rounds for a while, so that more can be fused with them."""

from __future__ import annotations

from hvdlab.collectives.coordinator.negotiation import Matcher
from hvdlab.collectives.coordinator.process_sets import ProcessSet


class _Held:
    """The held rounds of a process set's epoch: until when, and how many and how large they are so far."""

    __slots__ = ("count", "matcher", "nbytes", "until")

    def __init__(self, matcher: Matcher, until: float) -> None:
        self.matcher = matcher
        self.until = until
        self.count = 0
        self.nbytes = 0


class Holding:
    """Process sets whose ready rounds are held.

    Attributes:
        due: When the first of them has to be let go, or ``None``.
    """

    def __init__(self) -> None:
        self._held: dict[ProcessSet, _Held] = {}
        self.due: float | None = None

    def __contains__(self, ps: ProcessSet) -> bool:
        return ps in self._held

    def over(self, now: float, *, all: bool) -> list[ProcessSet]:
        """The process sets to decide now: those whose time has come, or all."""
        return [ps for ps, held in self._held.items() if all or now >= held.until]

    def keep(self, ps: ProcessSet, now: float, delay: float, enough: int) -> bool:
        """Whether to hold the ready rounds of ``ps``.

        Not for longer than ``delay`` seconds, not if they are ``enough`` bytes, not if one of them is never fused, such as a
        barrier, and not if it is the turn of rounds that were kept back for their priority.
        """
        matcher = ps.matcher
        ready = matcher.ready
        if matcher.schedule and not matcher.schedule.under_way:
            return self._let_go(ps)
        if delay <= 0 or not ready or matcher.rejections or matcher.conflict or ps.gone:
            return self._let_go(ps)
        held = self._held.get(ps)
        if held is None or held.matcher is not matcher or held.count > len(ready):
            held = self._held[ps] = _Held(matcher, now + delay)
        for current in ready[held.count :]:
            if current.info.fuse_key is None:
                return self._let_go(ps)
            held.nbytes += current.info.nbytes
        held.count = len(ready)
        if held.nbytes >= enough or now >= held.until:
            return self._let_go(ps)
        self._find_due()
        return True

    def _let_go(self, ps: ProcessSet) -> bool:
        if self._held.pop(ps, None) is not None:
            self._find_due()
        return False

    def _find_due(self) -> None:
        self.due = min([held.until for held in self._held.values()], default=None)

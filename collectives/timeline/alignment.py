"""Bringing the clocks of several hosts onto one time axis.

The axis is the clock of the domain seen first. Ranks of one domain share a clock, so nothing is estimated between
them. Between domains, samples against the coordinator's clock give an offset and a rigorous bound on its error.
"""

from __future__ import annotations

from collections import deque

from hvdlab.collectives.timeline.events import ClockSample

# Old samples go stale as clocks drift (some 10 us per second at worst); the best of the newest few is used.
SAMPLES_KEPT = 16


class Alignment:
    """Offsets of clock domains, from what ranks measured."""

    def __init__(self) -> None:
        self.reference: int | None = None
        self._samples: dict[int, deque[ClockSample]] = {}

    def observe(self, domain: int, sample: ClockSample | None = None) -> None:
        """A batch of this domain came; the first one ever makes it the reference."""
        if self.reference is None:
            self.reference = domain
        if sample is not None:
            self._samples.setdefault(domain, deque(maxlen=SAMPLES_KEPT)).append(sample)

    def offset(self, domain: int) -> tuple[int, int] | None:
        """Nanoseconds to add to a time of ``domain``, and how far off that may be; ``None`` while unknown."""
        if domain == self.reference:
            return 0, 0
        own = self._best(domain)
        reference = None if self.reference is None else self._best(self.reference)
        if own is None or reference is None:
            return None
        return own.offset_ns - reference.offset_ns, own.uncertainty_ns + reference.uncertainty_ns

    def _best(self, domain: int) -> ClockSample | None:
        return min(self._samples.get(domain, ()), key=lambda sample: sample.uncertainty_ns, default=None)

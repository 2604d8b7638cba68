"""Clocks of several hosts on one time axis: which processes share one, and how far others are apart.

The axis is the clock of the domain seen first. Ranks of one domain share a clock, so nothing is estimated between
them. Between domains, samples against the coordinator's clock give an offset and a rigorous bound on its error.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from functools import cache

from hvdlab.collectives.system import boot_id
from hvdlab.collectives.tracing.record_format import ClockSample

SAMPLES_KEPT = 8
"""Samples of this process's clock."""
DRIFT = 20e-6
"""Seconds per second by which the clocks of two hosts may drift apart, as common quartz does."""

DOMAIN_SAMPLES_KEPT = 16
"""Samples of a domain. Old ones go stale as clocks drift, so the best of the newest few is used."""

Sample = tuple[int, int, int]
"""When the question was sent, when the answer came, and the coordinator's time in between; in ns."""


class ClockSamples:
    """Newest samples of this process's clock against the coordinator's."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)

    def add(self, sent_ns: int, received_ns: int, coordinator_ns: int) -> None:
        """Add a sample: when the coordinator was asked, when it answered, and its time."""
        self._samples.append((sent_ns, received_ns, coordinator_ns))

    def best(self, now_ns: int) -> Sample | None:
        """Return the sample with the least error at ``now_ns``: its answer was quick, and not too long ago."""

        def error(sample: Sample) -> float:
            sent, received, _ = sample
            return (received - sent) / 2 + DRIFT * (now_ns - received)

        return min(self._samples, key=error, default=None)


@cache
def clock_domain() -> int:
    """Return a number that is equal for all processes whose ``CLOCK_MONOTONIC`` is the same clock.

    These are the processes of one boot of one machine, in one time namespace. Where that can't be read, the number is
    this process's alone: its clock is then aligned by measured samples.
    """
    boot = boot_id() or f"{os.getpid()} {time.time_ns()}"
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = ""
    return int.from_bytes(hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).digest(), "little")


class Alignment:
    """Offsets of clock domains, from the samples of ranks."""

    def __init__(self) -> None:
        #: The domain whose clock is the common axis.
        self.reference: int | None = None
        #: The newest samples of each domain.
        self._samples: dict[int, deque[ClockSample]] = {}

    def observe(self, domain: int, sample: ClockSample | None = None) -> None:
        """Add a domain, and a sample of its clock if there is one; the first domain becomes the reference."""
        if self.reference is None:
            self.reference = domain
        if sample is not None:
            self._samples.setdefault(domain, deque(maxlen=DOMAIN_SAMPLES_KEPT)).append(sample)

    def offset(self, domain: int) -> tuple[int, int] | None:
        """Return the nanoseconds to add to a time of ``domain``, and their greatest error; ``None`` while unknown."""
        if domain == self.reference:
            return 0, 0
        own = self._best(domain)
        reference = None if self.reference is None else self._best(self.reference)
        if own is None or reference is None:
            return None
        return own.offset_ns - reference.offset_ns, own.uncertainty_ns + reference.uncertainty_ns

    def _best(self, domain: int) -> ClockSample | None:
        return min(self._samples.get(domain, ()), key=lambda sample: sample.uncertainty_ns, default=None)

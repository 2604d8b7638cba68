"""Which processes share a clock, and how far that of another host is from the coordinator's."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from functools import cache

from hvdlab.collectives.system import boot_id

SAMPLES_KEPT = 8
DRIFT = 20e-6
"""Seconds per second by which the clocks of two hosts may drift apart, as common quartz does."""

Sample = tuple[int, int, int]
"""When the question was sent, when the answer came, and the coordinator's time in between; in ns."""


class ClockSamples:
    """The newest samples of this process's clock against the coordinator's."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)

    def add(self, sent_ns: int, received_ns: int, coordinator_ns: int) -> None:
        self._samples.append((sent_ns, received_ns, coordinator_ns))

    def best(self, now_ns: int) -> Sample | None:
        """The sample with the least error at ``now_ns``: its answer was quick, and not too long ago."""

        def error(sample: Sample) -> float:
            sent, received, _ = sample
            return (received - sent) / 2 + DRIFT * (now_ns - received)

        return min(self._samples, key=error, default=None)


@cache
def clock_domain() -> int:
    """A number that is equal for all processes whose ``CLOCK_MONOTONIC`` is the same clock.

    Those are the processes of one boot of one machine, in one time namespace. Where that can't be read, a number of this process
    alone: its clock is then aligned by measured samples instead of being taken as equal.
    """
    boot = boot_id() or f"{os.getpid()} {time.time_ns()}"
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = ""
    return int.from_bytes(hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).digest(), "little")

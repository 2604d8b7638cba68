"""Imported first by a rank of a test, with SKEWED_CLOCK set: rank 1 then lives on a host whose clock is 7 seconds ahead."""

from __future__ import annotations

import os
import time

from hvdlab.collectives.timeline import clock

AHEAD_NS = 7_000_000_000
_monotonic_ns = time.monotonic_ns


def _ahead() -> int:
    return _monotonic_ns() + AHEAD_NS


if os.environ.get("SKEWED_CLOCK") and os.environ.get("HVDLAB_RANK") == "1":
    time.monotonic_ns = _ahead
    clock.clock_domain = lambda: 4711  # type: ignore[assignment]  # without the cache

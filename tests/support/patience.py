"""How long tests wait, on machines as slow as they come.

No test asserts how long something took: that is a matter of the machine, and of ``benchmarks/``. One that checks
*which* event ended a wait makes every timer that could end it as well an hour long, so that a product which misses the
event hangs, and the test fails by its patience.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

PATIENCE = 60.0
"""Seconds that a test waits for what must come. They bound a hang, and say nothing about how soon it comes."""

PROGRAM_PATIENCE = 4 * PATIENCE
"""Seconds for programs of several processes, each of which imports frameworks, from their start to their end."""

HOUR = 3600.0
"""Seconds of a timer that must not be what ends a wait."""

GONE = 20.0
"""Seconds in which an end must be seen, or processes be gone: fewer than the 30 after which a silent coordinator counts as lost,
and for which a rank waits for another one."""


def eventually(happened: Callable[[], object], what: Callable[[], object] = lambda: None) -> None:
    """Poll until it has happened, where no event reports it; ``what`` is shown if it never does."""
    until = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < until, what()
        time.sleep(0.1)


_HEARTBEAT = ("HVDLAB_PING_AFTER", "HVDLAB_DEAD_AFTER")


def without_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let coordinators and ranks that are started from now on look for silent ones after an hour: an end that is not seen is missed."""
    for name in _HEARTBEAT:
        monkeypatch.setenv(name, f"{HOUR:g}")

"""Imported first by a rank of a test, with SKEWED_CLOCK set: rank 1 then lives on a host whose clock is 7 seconds ahead."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from hvdlab.collectives.tracing import record_format

AHEAD_NS = 7_000_000_000  # 7 s
_monotonic_ns = time.monotonic_ns


def _ahead() -> int:
    return _monotonic_ns() + AHEAD_NS


def _replace(old: Callable[[], int], new: Callable[[], int]) -> None:
    """Also where it is known by a name of its own: a forked rank has imported the library before."""
    for name, module in list(sys.modules.items()):
        if name == "time" or name.startswith("hvdlab."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


if os.environ.get("SKEWED_CLOCK") and os.environ.get("HVDLAB_RANK") == "1":
    _replace(_monotonic_ns, _ahead)
    _replace(record_format.clock_domain, lambda: 4711)

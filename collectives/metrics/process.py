"""Samples of what the process of this rank uses: processor time, memory, threads."""

from __future__ import annotations

import os
import time

from hvdlab.collectives.metrics import names
from hvdlab.collectives.system import RESIDENT, THREADS, process_status

Values = list[tuple[str, float]]

_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage:
    """Samples this process. Processor time is counted since the sample before, or since this object was made."""

    def __init__(self) -> None:
        self._before = time.monotonic_ns(), time.process_time_ns()

    def sample(self) -> Values:
        """Name and value of each metric, measured now."""
        now, used = time.monotonic_ns(), time.process_time_ns()
        fields = process_status("self")
        cpu = 100 * (used - self._before[1]) / max(now - self._before[0], 1)
        self._before = now, used
        return [
            (names.CPU, cpu),
            (names.RSS, float(int(fields[RESIDENT]) * _PAGE)),
            (names.THREADS, float(fields[THREADS])),
        ]

    def close(self) -> None:
        """Nothing is held."""

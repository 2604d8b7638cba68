"""The check of tests beside an engine, whose own processes, threads and sockets come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

import shared_memory
from our_processes import our_processes
from patience import PATIENCE


@contextlib.contextmanager
def nothing_of_ours_left() -> Iterator[None]:
    """Fail if a process of hvdlab's below this one, or memory of ours, is left at the end of the block."""
    before, memory = {process.pid for process in our_processes()}, shared_memory.entries()
    yield
    _, left = psutil.wait_procs(
        [each for each in our_processes() if each.pid not in before], timeout=PATIENCE
    )
    assert left == []
    assert shared_memory.left(memory) == set()

"""The checks for leaks that replace the one of all tests, where others than the test start and end processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from support import shared_memory
from support.our_processes import our_processes
from support.patience import PATIENCE


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


@pytest.fixture(autouse=True)
def no_leak_check() -> None:
    """Skip the check for leaks in a module that imports this as ``leak_check``."""

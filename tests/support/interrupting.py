"""An interrupt at the moment when a thread waits for a collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def when_this_thread_waits(
    action: Callable[[], None], functions: frozenset[str] = frozenset({"wait_and_execute", "_wait_long"})
) -> threading.Thread:
    """Do this as soon as the calling thread is in one of these functions, in which it waits, and not before."""
    waiting = threading.get_ident()

    def watch() -> None:
        while not _stack_of(waiting) & functions:
            time.sleep(0.001)
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _stack_of(thread: int) -> set[str]:
    frame = sys._current_frames().get(thread)
    found = set()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return found

"""Threads of a test: run to their end, or known to sleep."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run all to their end; the first error is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(w,)) for w in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(t.is_alive() for t in threads), "a wake-up was lost"
    if errors:
        raise errors[0]


def asleep(thread_id: int, lock: int | None = None) -> None:
    """Return when the thread sleeps in the kernel.

    Args:
        lock: The address of the C lock that it is to wait for; without, it may sleep for any reason.
    """
    while True:
        if lock is not None:
            with open(f"/proc/self/task/{thread_id}/syscall") as file:
                if file.read().split()[1:2] == [hex(lock)]:
                    return
            os.sched_yield()
            continue
        with open(f"/proc/self/task/{thread_id}/wchan") as file:
            where = file.read()
        if "futex" in where:
            return
        with open(f"/proc/self/task/{thread_id}/stat") as file:
            if not where.strip("0") and file.read().rpartition(")")[2].split()[0] == "S":
                return
        os.sched_yield()


class ReportingLock:
    """Lock that reports a thread which has to wait for it."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._lock, self._report = threading.Lock(), report

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._report()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

"""A thread that goes on with a cell while the one that drives it waits for the user."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def standing_in(
    step: Callable[[], object], wake: Callable[[], object], failed: Callable[[], object]
) -> Iterator[None]:
    """Have another thread repeat ``step`` until the block is left; that thread has ended then.

    It has the calling thread's context variables, in which a kernel keeps the request that output belongs to.

    Args:
        step: Waits for what happens next, and does what is due then.
        wake: Makes a ``step`` that waits return. Any thread.
        failed: Called, on the other thread, when a step raised; its error is raised when the block is left.
    """
    over = threading.Event()
    errors: list[BaseException] = []

    def go_on() -> None:
        try:
            while not over.is_set():
                step()
        except BaseException as error:  # noqa: BLE001  # raised below, on the thread whose work this is
            errors.append(error)
            failed()

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(go_on,), name="hvdlab-stand-in", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # no thread can be started: output waits for the answer
        yield
        return
    try:
        yield
    finally:
        over.set()
        wake()
        thread.join()
        if errors:
            raise errors[0]

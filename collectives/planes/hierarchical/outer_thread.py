"""A thread for the outer plane, so that the network works on one block while the executor's thread works on others within the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Operation = tuple[Callable[[], None], "Future[None]"]


class OuterThread:
    """Calls operations of a plane one after another. Belongs to the executor's thread, but for what the operations do.

    The thread begins with the first operation. It is a daemon, since a library that can't end an operation must not keep the
    process from ending.
    """

    def __init__(self) -> None:
        self._operations: SimpleQueue[_Operation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, operation: Callable[[], None]) -> Future[None]:
        """Have an operation called after those before it. The future has its end, or the error that it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdlab-outer", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._operations.put((operation, future))
        return future

    def _run(self) -> None:
        while (item := self._operations.get()) is not None:
            operation, future = item
            try:
                operation()
            # Whatever it is, it is the executor's, which waits for the future.
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, operation, future  # their buffers are not kept until the next one

    def close(self) -> None:
        """Wait for the end of the operations, which the caller has aborted, and of the thread. Idempotent."""
        if self._thread is not None:
            self._operations.put(None)
            self._thread.join()
            self._thread = None

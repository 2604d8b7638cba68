"""Taking items from an iterable in a thread, a bounded number of them ahead of their consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """An iterator over what a thread takes from an iterable; the thread starts with the first item that is asked for.

    An exception of the iterable is raised after the items before it. The thread has ended when iteration has, in
    whatever way: at the end, by an exception, by :meth:`close`.

    Args:
        make: Called in the thread; makes the iterable.
        limit: Items that may be ahead, at least 1.
    """

    def __init__(self, make: Callable[[], Iterable[T]], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False  # nothing more will come
        self._stopped = False  # nothing more is wanted
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="hvdlab-data-loader", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._stopped)
            if self._items and not self._stopped:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread, as soon as the iterable lets it, and drop what it has loaded. Idempotent."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            iterator = iter(self._make())
            try:
                for item in iterator:
                    if not self._put(item):
                        break
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:  # a generator's: what it holds is let go of in its own thread
                    close()
        except BaseException as raised:  # noqa: BLE001  (raised again where the items are consumed)
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._limit or self._stopped)
            if not self._stopped:
                self._items.append(item)
                self._changed.notify_all()
            return not self._stopped

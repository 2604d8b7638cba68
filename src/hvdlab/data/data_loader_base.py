"""Horovod's data loader classes, and the iterator with a thread that loads a bounded number of batches ahead."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Iterator over the items that a thread reads from an iterable; the thread starts with the first request.

    An exception of the iterable is raised after the items before it. The thread has ended when iteration has, in
    any way: at the end, by an exception, by :meth:`close`.

    Args:
        iterable: Its items; the thread makes and closes the iterator.
        limit: Items that may be ahead, at least 1.
    """

    def __init__(self, iterable: Iterable[T], limit: int) -> None:
        self._iterable = iterable
        self._limit = limit
        #: Items that were read ahead.
        self._items: deque[T] = deque()
        #: Guards all fields; notified when an item was added or consumed, and at the end.
        self._changed = threading.Condition()
        self._ended = False  # nothing more will come
        self._stopped = False  # no more items are needed
        #: The exception that has ended the iterable, until it is raised to the consumer.
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
        """End the thread, as soon as the iterable lets it, and drop its loaded items. Idempotent."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()
        thread = self._thread
        # A thread can't join itself, as when the iterable closes this.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            iterator = iter(self._iterable)
            try:
                for item in iterator:
                    if not self._put(item):
                        break
            finally:
                close = getattr(iterator, "close", None)
                if close is not None:  # a generator's: its resources are released in its own thread
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


logger = logging.getLogger("hvdlab.data")


class BaseDataLoader:
    """Base of loaders that iterate over batches; a subclass defines which."""

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """Return the batches, as they are loaded."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Return a batch as it is given out, on the consuming thread; the batch itself by default."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class _Iteration(Iterable[Any]):
    """One iteration over a loader's batches, which calls the loader only on the thread that iterates."""

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader._iterate())


class AsyncDataLoaderMixin:
    """Mixin that loads batches ahead, in a thread that lives as long as an iteration does.

    Put it in front of a :class:`BaseDataLoader`. ``_iterate`` runs in the thread; ``_process_batch`` (which may move
    a batch to a device) where the batches are consumed. An exception of ``_iterate`` is raised there as well, after the batches
    that came before it. The thread has ended when the iteration has: at its end, after an exception, and when it is
    left early and forgotten, or :meth:`close_async_loader` is called.

    Each iteration begins to load when its first batch is asked for. (Horovod's thread loads the next epoch during the
    present one, with the sampler's old settings.)

    Args:
        async_loader_queue_size: Batches that may be loaded ahead; 0 loads each when it is asked for, without a thread.
        debug_data_loader: Whether to log each batch at level ``DEBUG``.
        args, kwargs: For the next class.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        #: Iterations at work; a forgotten one ends by itself.
        self._running: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End all iterations at work, and their threads. A thread that asks one for its next batch gets its end."""
        for ahead in list(self._running):
            ahead.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            return self._give_out(self._iterate())  # type: ignore[attr-defined]  # the class that this is mixed into
        ahead: Ahead[Any] = Ahead(_Iteration(self), self.async_loader_queue_size)  # type: ignore[arg-type]  # the same
        self._running.add(ahead)
        return self._give_out(ahead)

    def _give_out(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        try:
            for number, batch in enumerate(batches):
                if self.debug_data_loader:
                    logger.debug("batch %d of %s", number, type(self).__name__)
                yield self._process_batch(batch)  # type: ignore[attr-defined]  # the class that this is mixed into
        finally:
            if isinstance(batches, Ahead):
                batches.close()

"""Horovod's data loader classes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from hvdlab.data.ahead import Ahead

logger = logging.getLogger("hvdlab.data")


class BaseDataLoader:
    """Iterates over batches; a subclass says over which."""

    def __len__(self) -> int:
        """Number of batches of one iteration."""
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        """The batches, as they are loaded."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """What is made of a batch before it is given out, on the thread that takes it; the batch itself by default."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Loads batches ahead, in a thread that lives as long as an iteration does.

    Put it in front of a :class:`BaseDataLoader`. ``_iterate`` runs in the thread; ``_process_batch`` (which may move
    a batch to a device) where the batches are taken. What ``_iterate`` raises is raised there as well, after the batches
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
        self._running: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End all iterations at work, and their threads. A thread that takes the next batch of one finds its end."""
        for ahead in list(self._running):
            ahead.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            return self._give_out(self._iterate())  # type: ignore[attr-defined]  # the class that this is mixed into
        ahead: Ahead[Any] = Ahead(self._iterate, self.async_loader_queue_size)  # type: ignore[attr-defined]  # the same
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

"""Data loaders: order, errors, and the thread that loads ahead."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest

from hvdlab.data import AsyncDataLoaderMixin, BaseDataLoader
from support.patience import PATIENCE


class Plain(BaseDataLoader):
    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(list(self.items))

    def _iterate(self) -> Iterator[Any]:
        yield from self.items


class Loader(AsyncDataLoaderMixin, Plain):
    """Notes on which threads it works."""

    def __init__(self, items: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, items=items, **kwargs)
        self.loaded_by: set[str] = set()
        self.processed_by: set[str] = set()
        self.closed = threading.Event()

    def _iterate(self) -> Iterator[Any]:
        try:
            for item in super()._iterate():
                self.loaded_by.add(threading.current_thread().name)
                yield item
        finally:
            self.closed.set()

    def _process_batch(self, batch: Any) -> Any:
        self.processed_by.add(threading.current_thread().name)
        return super()._process_batch(batch) * 10


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "hvdlab-data-loader"]


def test_a_plain_loader_gives_out_processed_batches() -> None:
    assert list(Plain(range(3))) == [0, 1, 2]
    assert len(Plain(range(3))) == 3


def test_the_base_leaves_the_rest_to_subclasses() -> None:
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError):
        next(iter(BaseDataLoader()))


@pytest.mark.parametrize("size", [0, 1, 2, 64])
def test_batches_come_in_order_in_every_epoch(size: int) -> None:
    loader = Loader(range(5), async_loader_queue_size=size)
    for _ in range(3):
        assert list(loader) == [0, 10, 20, 30, 40]
    assert len(loader) == 5
    assert threads() == []
    main = threading.current_thread().name
    assert loader.processed_by == {main}
    assert loader.loaded_by == ({main} if size == 0 else {"hvdlab-data-loader"})


def test_arguments_by_position_are_horovods() -> None:
    loader = Loader([1], 3, True)
    assert (loader.async_loader_queue_size, loader.debug_data_loader) == (3, True)
    assert Loader([1]).async_loader_queue_size == 64


def test_no_more_is_loaded_ahead_than_the_queue_takes() -> None:
    loaded = threading.Semaphore(0)
    count = []

    def items() -> Iterator[int]:
        for number in range(10):
            count.append(number)
            loaded.release()
            yield number

    class Counting(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self) -> Iterator[int]:
            return items()

    batches = iter(Counting(async_loader_queue_size=2))
    assert next(batches) == 0
    for _ in range(4):  # one taken, two in the queue, one in the thread's hand
        assert loaded.acquire(timeout=PATIENCE)
    assert not loaded.acquire(timeout=0.05)
    assert len(count) == 4
    assert isinstance(batches, Generator)
    batches.close()
    assert threads() == []


@pytest.mark.parametrize("size", [0, 2])
def test_an_error_reaches_who_takes_the_batches_after_those_before_it(size: int) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    class Failing(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self) -> Iterator[int]:
            return items()

    batches = iter(Failing(async_loader_queue_size=size))
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk") as caught:
        next(batches)
    assert "items" in [entry.name for entry in caught.traceback]
    assert threads() == []


def test_an_error_of_processing_ends_the_thread() -> None:
    loader = Loader([1, "x", None, 2], async_loader_queue_size=1)
    with pytest.raises(TypeError):
        list(loader)
    assert threads() == []
    assert loader.closed.is_set()


def test_leaving_early_ends_the_thread() -> None:
    loader = Loader(range(1000), async_loader_queue_size=2)
    for batch in loader:
        if batch == 30:
            break
    gc.collect()
    assert threads() == []
    assert loader.closed.is_set()


def test_closing_ends_iterations_and_a_new_one_begins_anew() -> None:
    loader = Loader(range(100), async_loader_queue_size=2)
    first, second = iter(loader), iter(loader)
    assert (next(first), next(second), next(first)) == (0, 0, 10)
    assert len(threads()) == 2
    loader.close_async_loader()
    loader.close_async_loader()
    assert threads() == []
    assert (list(first), list(second)) == ([], [])
    assert next(iter(loader)) == 0
    gc.collect()


def test_closing_from_another_thread_wakes_who_waits_for_a_batch() -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self) -> Iterator[int]:
            asked.set()
            go_on.wait(PATIENCE)
            yield 1

    loader = Slow()
    found: list[list[int]] = []
    consumer = threading.Thread(target=lambda: found.append(list(iter(loader))))
    consumer.start()
    assert asked.wait(PATIENCE)
    closer = threading.Thread(target=loader.close_async_loader)
    closer.start()
    go_on.set()
    consumer.join(PATIENCE)
    closer.join(PATIENCE)
    assert found in ([[]], [[1]])
    assert threads() == []


def test_batches_are_logged_if_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hvdlab.data")
    list(Loader([1, 2], debug_data_loader=True))
    assert [record.message for record in caplog.records] == ["batch 0 of Loader", "batch 1 of Loader"]

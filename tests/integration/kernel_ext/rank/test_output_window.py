"""A rank that waits for room gets it, from a pool that acknowledges output as the notebook does."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.cells.cell_events import OutputArrived, SendAcknowledge
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.dispatch import MessageFate, ReceiveWindow
from hvdlab.kernel_ext.rank.output import LEAST_WINDOW, WINDOW, OutputQueue
from hvdlab.kernel_ext.wire.cells import ACK_BYTES, Chunk, Display, Output
from hvdlab.kernel_ext.wire.codec import decode_to_pool


class PlayedPool:
    """Pool that takes the messages of rank 0 in order, and acknowledges them as a cell in the notebook does.

    Attributes:
        chunks: The output that it has taken.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._arrivals = ReceiveWindow([0])
        self._cell = CellState("c", [0], now=0.0)
        self._on_the_way: deque[bytes] = deque()

    def post(self, topic: str, body: bytes) -> None:
        """Carry a message, until the pool takes it."""
        self._on_the_way.append(body)

    def take_messages(self, rank: OutputQueue) -> None:
        """Take all messages that are on their way, and acknowledge them."""
        while self._on_the_way:
            message = decode_to_pool(self._on_the_way.popleft())
            assert isinstance(message, Output)
            assert self._arrivals.output(0, message) is MessageFate.TAKE
            self.chunks += message.chunks
            for effect in self._cell.handle(OutputArrived(0, message.chunks, message.total), 0.0):
                if isinstance(effect, SendAcknowledge):
                    rank.acknowledge("c", effect.taken)


class TakenMeanwhile(threading.Condition):
    """Condition for room, in whose wait the rank sends all and the pool takes all: then there must be room."""

    def __init__(self, queue: OutputQueue, pool: PlayedPool) -> None:
        super().__init__(queue._lock)
        self._queue, self._pool = queue, pool

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._queue.flush()
        self._pool.take_messages(self._queue)
        assert predicate(), "the rank waits for an acknowledgement that never comes"
        return True


@contextlib.contextmanager
def cell_of_rank(pool: PlayedPool, ranks: int = 1) -> Iterator[OutputQueue]:
    """Yield the queue of a rank that has begun cell ``c``, and sends only where it waits or a test flushes it."""
    queue = OutputQueue(pool.post, ranks=lambda: ranks)
    queue._room = TakenMeanwhile(queue, pool)
    queue.sent.register("c")
    queue.begin_cell("c")
    try:
        yield queue
    finally:
        queue.start()
        queue.close()


@pytest.mark.parametrize(("ranks", "window"), [(1, WINDOW), (32, LEAST_WINDOW)])
@pytest.mark.parametrize("more", [-10, 0, 1, 1000])
def test_a_large_display_waits_only_for_output_that_the_pool_acknowledges(
    ranks: int, window: int, more: int
) -> None:
    """The pool acknowledges the text before it only together with the display."""
    pool = PlayedPool()
    image = Display({"image/png": "x" * (window + more)}, {})
    with cell_of_rank(pool, ranks) as queue:
        queue.write("stdout", "x" * 20)
        queue.put(image)
        queue.write("stdout", "after")
        queue.flush()
        pool.take_messages(queue)
    assert image in pool.chunks


def test_each_window_has_room_for_more_than_the_pool_leaves_unacknowledged() -> None:
    assert LEAST_WINDOW > ACK_BYTES

"""A rank that waits for room gets it, from a pool that acknowledges output as the notebook does."""

from __future__ import annotations

import codecs
import contextlib
import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hvdlab.kernel_ext.notebook.cells.cell_events import OutputArrived, SendAcknowledge
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.dispatch import MessageFate, ReceiveWindow
from hvdlab.kernel_ext.rank import output, pipes
from hvdlab.kernel_ext.rank.output import LEAST_WINDOW, WINDOW, OutputQueue
from hvdlab.kernel_ext.rank.output_log import OutputLog
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.wire import crash_ring
from hvdlab.kernel_ext.wire.cells import ACK_BYTES, CellDone, Chunk, Clear, Display, Output, Stream
from hvdlab.kernel_ext.wire.codec import decode_to_pool
from hvdlab.kernel_ext.wire.crash_ring import CrashRing, make_area
from support.fakes.posting_engine import PostingEngine


class PlayedPool:
    """Pool that takes the messages of rank 0 in order, and acknowledges them as a cell in the notebook does.

    Args:
        ack_bytes: Bytes between two acknowledgements.
        area: Descriptor of the area of the rank's crash ring; -1 if it has none.

    Attributes:
        chunks: The output that it has taken.
    """

    def __init__(self, ack_bytes: int = ACK_BYTES, area: int = -1) -> None:
        self.chunks: list[Chunk] = []
        self._arrivals = ReceiveWindow([0])
        self._cell = CellState("c", [0], now=0.0, ack_bytes=ack_bytes)
        self._area = area
        self._on_the_way: deque[bytes] = deque()

    def post(self, topic: str, body: bytes) -> None:
        """Carry a message, until the pool takes it."""
        self._on_the_way.append(body)

    def take_messages(self, rank: OutputQueue, complete: bool = True) -> None:
        """Take all messages that are on their way, and acknowledge them.

        Args:
            rank: The rank's queue.
            complete: Whether each message follows on the one before; otherwise those that are missing are asked for.
        """
        while self._on_the_way:
            message = decode_to_pool(self._on_the_way.popleft())
            if isinstance(message, CellDone):
                assert self._arrivals.done(0, message) is MessageFate.TAKE
                continue
            assert isinstance(message, Output)
            fate = self._arrivals.output(0, message)
            if not complete and fate is MessageFate.ASK:
                self.lose_messages(rank)
                continue
            assert fate is MessageFate.TAKE
            self.chunks += message.chunks
            for effect in self._cell.handle(OutputArrived(0, message.chunks, message.total), 0.0):
                if isinstance(effect, SendAcknowledge):
                    self._arrivals.acknowledged(0, effect.taken)
                    rank.acknowledge("c", effect.taken)

    def lose_messages(self, rank: OutputQueue) -> None:
        """Lose the messages that are on their way with a coordinator, and have the rank retransmit them."""
        self._on_the_way.clear()
        position = self._arrivals.resend_position(0)
        assert position is not None
        rank.resend([("c", *position)])

    def output_after_crash(self) -> list[Chunk | None]:
        """Return all output that would be shown if the rank died now, and the messages on their way were lost with it."""
        if self._area < 0:
            return [*self.chunks]
        found = crash_ring.read(self._area)
        assert found is not None
        arrivals = copy.deepcopy(self._arrivals)
        taken = arrivals.take_crash_output(0, found.left)
        assert taken is not None
        missing, rest = taken
        assert not missing, f"{missing} bytes are in no message that came, and not in the ring"
        return [*self.chunks, *rest.chunks]


class TakenMeanwhile(threading.Condition):
    """Condition for room, in whose wait the rank sends all and the pool takes all: then there must be room.

    The window is full before that, and no output is lost even if the rank dies then.
    """

    def __init__(self, queue: OutputQueue, pool: PlayedPool) -> None:
        super().__init__(queue._lock)
        self._queue, self._pool = queue, pool

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._pool.output_after_crash()
        self._queue.flush()
        self._pool.take_messages(self._queue)
        assert predicate(), "the rank waits for an acknowledgement that never comes"
        return True


@contextlib.contextmanager
def cell_of_rank(
    pool: PlayedPool, ranks: int = 1, fds: FdCapture | None = None, unsent: CrashRing | None = None
) -> Iterator[OutputQueue]:
    """Yield the queue of a rank that has begun cell ``c``, and sends only where it waits or a test flushes it."""
    queue = OutputQueue(PostingEngine(pool.post, ranks), fds=fds, unsent=unsent)
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


def interrupted_while_it_sends(queue: OutputQueue, step: int) -> bool:
    """Send, with a KeyboardInterrupt before so many instructions of the queue and the log. Return whether there were that many."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if frame.f_code not in (OutputQueue._send_queued.__code__, OutputLog.output.__code__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == step:
                sys.settrace(None)  # not in the handler of this interrupt
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        queue.flush()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("lost", [False, True], ids=["arrives", "lost"])
def test_an_interrupt_while_a_rank_sends_loses_no_output(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Nothing is shown twice, either, and no byte is counted that never leaves: such bytes would narrow the window for ever."""
    monkeypatch.setattr(output, "MESSAGE", 3)  # a message for each two entries
    step, interrupted = 0, True
    while interrupted:
        step += 1
        pool = PlayedPool()
        with cell_of_rank(pool) as queue:
            for text in ("ab", "cd", "ef"):
                queue._put((("stdout", "stderr")[text in "cd"], text, 2))
            interrupted = interrupted_while_it_sends(queue, step)
            queue._put(("stdout", "gh", 2))
            queue.flush()
            if lost:
                pool.lose_messages(queue)
            pool.take_messages(queue, complete=False)
            shown = "".join(chunk.text for chunk in pool.chunks if isinstance(chunk, Stream))
            assert shown == "abcdefgh", step
            assert queue._total == 8, step
    assert step > 150


def test_a_display_without_data_is_sent_again_as_well() -> None:
    pool = PlayedPool()
    with cell_of_rank(pool) as queue:
        queue.put(Display({}, {"title": "empty"}))
        queue.flush()
        pool.lose_messages(queue)
        pool.take_messages(queue)
    assert pool.chunks == [Display({}, {"title": "empty"})]


SCALE = 64
"""All sizes of the window and the ring are so many times smaller here, in the same proportions."""
TINY_WINDOW = LEAST_WINDOW // SCALE
TINY_ACK = ACK_BYTES // SCALE
FROM_PYTHON = "abü€"
STREAMS = st.sampled_from(["stdout", "stderr"])


def use_tiny_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(output, "window_of", lambda ranks: TINY_WINDOW)
    patch.setattr(output, "ACK_BYTES", TINY_ACK)
    patch.setattr(output, "GAP", -1.0)  # each write looks into the pipes
    for module, name in (
        (output, "PIECE"),
        (output, "MESSAGE"),
        (crash_ring, "SLACK"),
        (crash_ring, "MARK_EVERY"),
        (crash_ring, "LARGEST_DISPLAY"),
        (pipes, "_CHUNK"),
    ):
        patch.setattr(module, name, getattr(module, name) // SCALE)


def streams_of(chunks: Sequence[Chunk | None], alphabet: str) -> list[tuple[str, str]]:
    """Return the characters of this alphabet in order, each with its stream."""
    return [(c.name, x) for c in chunks if isinstance(c, Stream) for x in c.text if x in alphabet]


@pytest.fixture
def tiny_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks tiny windows and rings."""
    use_tiny_windows(monkeypatch)


def alternate(queue: OutputQueue) -> None:
    queue.write("stdout", "a")
    queue.write("stderr", "b")


def alternate_in_pipes(queue: OutputQueue) -> None:
    for fd in (1, 2):
        os.write(fd, b"p")
        queue._drain_fds()


def alternate_with_a_pipe(queue: OutputQueue) -> None:
    queue.write("stderr", "a")
    os.write(1, b"p")
    queue._drain_fds()


def write_what_is_no_text(queue: OutputQueue) -> None:
    os.write(1, b"\xff" * (30 << 10))  # as text, each byte is a character of three
    queue._drain_fds()


def show_structured_data(queue: OutputQueue) -> None:
    queue.put(Display({"application/json": ["x" * 700]}, {}))


def clear_and_write(queue: OutputQueue) -> None:
    queue.put(Clear())
    queue.write("stdout", "a")


def write_after_a_long_text(queue: OutputQueue) -> None:
    queue.write("stdout", "\N{PILE OF POO}" * output.PIECE)
    queue._room.wait_for(lambda: True)  # the pool takes that
    for _ in range(TINY_WINDOW // 64 + 1):
        queue.write("stdout", "b" * 64)


@pytest.mark.usefixtures("tiny_windows")
@pytest.mark.parametrize(
    "step",
    [
        alternate,
        alternate_in_pipes,
        alternate_with_a_pipe,
        write_what_is_no_text,
        show_structured_data,
        clear_and_write,
        write_after_a_long_text,
    ],
)
def test_a_full_window_has_room_in_the_crash_ring(step: Callable[[OutputQueue], None]) -> None:
    with contextlib.ExitStack() as stack:
        area = make_area()
        stack.callback(os.close, area)
        fds = FdCapture()
        stack.callback(fds.close)
        pool = PlayedPool(TINY_ACK, area)
        queue = stack.enter_context(cell_of_rank(pool, fds=fds, unsent=CrashRing(area)))
        while int.from_bytes(os.pread(area, 8, 0), "little") < 5 * TINY_WINDOW:  # more than three rings
            step(queue)
            if queue._room_for_pipes() <= 0:
                pool.output_after_crash()
                queue.flush()
                pool.take_messages(queue)
        pool.output_after_crash()


class RanksOutput(RuleBasedStateMachine):
    """A cell's output from Python, displays and processes, of which none is lost if the rank dies after any step."""

    def __init__(self) -> None:
        super().__init__()
        with contextlib.ExitStack() as stack:
            use_tiny_windows(stack.enter_context(pytest.MonkeyPatch.context()))
            self.area = make_area()
            stack.callback(os.close, self.area)
            self.fds = FdCapture()
            stack.callback(self.fds.close)
            self.pool = PlayedPool(TINY_ACK, self.area)
            self.queue = stack.enter_context(
                cell_of_rank(self.pool, fds=self.fds, unsent=CrashRing(self.area))
            )
            self.stack = stack.pop_all()
        self.written: list[Chunk | None] = []
        self.piped = {"stdout": b"", "stderr": b""}

    @rule(stream=STREAMS, text=st.text(FROM_PYTHON, min_size=1, max_size=20), times=st.integers(1, 2000))
    def write(self, stream: str, text: str, times: int) -> None:
        """Write much text, of one stream."""
        self.queue.write(stream, text * times)
        self.written.append(Stream(stream, text * times))

    @rule(times=st.sampled_from([1, 2, 999, 20_000]), text=st.sampled_from(FROM_PYTHON))
    def alternate(self, times: int, text: str) -> None:
        """Write one character after the other, each of another stream than the one before."""
        for n in range(times):
            stream = ("stdout", "stderr")[n % 2]
            self.queue.write(stream, text)
            self.written.append(Stream(stream, text))

    @rule(
        size=st.one_of(st.integers(0, 2000), st.integers(0, 2 * TINY_WINDOW)),
        estimated=st.booleans(),
        times=st.sampled_from([1, 2, 40]),
    )
    def display(self, size: int, estimated: bool, times: int) -> None:
        """Show texts, or data that are estimated to be small; and a character after each."""
        for _ in range(times):
            self.queue.put(Display({"d": "x" * size if not estimated else ["x" * size]}, {}))
            self.queue.write("stdout", "a")
            self.written += [None, Stream("stdout", "a")]

    @rule(
        stream=STREAMS,
        text=st.sampled_from(["p", "ö", "\N{PILE OF POO}"]),
        size=st.integers(1, 20_000),
        cut=st.integers(0, 1),
    )
    def write_from_process(self, stream: str, text: str, size: int, cut: int) -> None:
        """Write to a descriptor as far as its pipe has room: bytes of which each is a replacement character as text, too."""
        raw = (text * size).encode()[cut:]
        fd = self.fds.readers[stream == "stderr"]
        raw = raw[: max(0, PIPE - pipes._available(fd))]
        os.write(1 + (stream == "stderr"), raw)
        self.piped[stream] += raw

    @rule()
    def send(self) -> None:
        """Send, as the thread of the queue does."""
        self.queue.flush()

    @rule()
    def arrive(self) -> None:
        """Let the pool take all that was sent."""
        self.pool.take_messages(self.queue)

    @rule()
    def lose_coordinator(self) -> None:
        """Lose all that was sent and has not come."""
        self.pool.lose_messages(self.queue)

    @invariant()
    def all_output_outlives_the_rank(self) -> None:
        self._compare(self.pool.output_after_crash())

    def _compare(self, chunks: list[Chunk | None]) -> None:
        assert streams_of(chunks, FROM_PYTHON) == streams_of(self.written, FROM_PYTHON)
        assert sum(not isinstance(c, Stream) for c in chunks) == self.written.count(None)
        for fd, (stream, raw) in zip(self.fds.readers, self.piped.items(), strict=True):
            read = codecs.getincrementaldecoder("utf-8")("replace").decode(raw[: self.fds._read[fd]])
            shown = "".join(c.text for c in chunks if isinstance(c, Stream) and c.name == stream)
            assert [x for x in shown if x not in FROM_PYTHON] == list(read)

    def teardown(self) -> None:
        """End the cell: its output has come."""
        with self.stack:
            self.queue.finish(CellDone("c", None, 0.0))
            self.pool.take_messages(self.queue)
            self._compare(list(self.pool.chunks))
            assert all(pipes._available(fd) == 0 for fd in self.fds.readers)


PIPE = 64 << 10
"""Bytes for which a pipe has room."""

TestRanksOutput = RanksOutput.TestCase
TestRanksOutput.settings = settings(deadline=None, max_examples=25, stateful_step_count=20)

"""A cell's output arrives complete, in order, early, and not faster than the pool reads it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import pytest

from hvdlab.kernel_ext.rank.output import (
    BATCH,
    INTERVAL,
    PIECE,
    WINDOW,
    EngineMail,
    ExitFlush,
    OutputQueue,
    RankStream,
    set_current_cell,
    window_of,
)
from hvdlab.kernel_ext.rank.pipes import FdCapture, PipeText
from hvdlab.kernel_ext.wire import codec
from hvdlab.kernel_ext.wire.cells import (
    Acknowledge,
    AcknowledgeLate,
    CellDone,
    Display,
    Late,
    Output,
    ResendFrom,
    Stream,
)
from support.fakes.posting_engine import PostingEngine
from support.patience import PATIENCE

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank


class Sent:
    """Engine that keeps the messages that an OutputQueue posts."""

    size = 1

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.some = threading.Event()

    def post(self, topic: str, body: bytes) -> None:
        mail = codec.decode_to_pool(body)
        assert isinstance(mail, Output)
        self.outputs.append(mail)
        self.some.set()

    @property
    def text(self) -> str:
        return "".join(c.text for o in self.outputs for c in o.chunks if isinstance(c, Stream))


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def capture(sent: Sent) -> Iterator[OutputQueue]:
    capture = OutputQueue(sent)
    capture.start()
    yield capture
    capture.close()


# -- order and batches ------------------------------------------------------------------------------------------------


def test_chunks_keep_their_order(rank: Rank) -> None:
    ran = rank.run(
        "import sys\nfrom IPython.display import display, clear_output\n"
        "print('a')\nprint('b', file=sys.stderr)\ndisplay('c')\nprint('d')\nclear_output(wait=True)\nprint('e')"
    )
    kinds = [(type(c).__name__, getattr(c, "name", ""), getattr(c, "text", "")) for c in ran.chunks]
    assert kinds == [
        ("Stream", "stdout", "a\n"),
        ("Stream", "stderr", "b\n"),
        ("Display", "", ""),
        ("Stream", "stdout", "d\n"),
        ("Clear", "", ""),
        ("Stream", "stdout", "e\n"),
    ]
    assert ran.clears[0].wait


def test_neighbouring_texts_are_one_chunk(capture: OutputQueue, sent: Sent) -> None:
    with capture._sending:  # the thread that sends has to wait
        for i in range(100):
            capture.write("stdout", f"{i}\n")
    capture.flush()
    assert sum(len(o.chunks) for o in sent.outputs) <= 2
    assert sent.text == "".join(f"{i}\n" for i in range(100))


def test_the_first_output_leaves_before_the_cell_ends(rank: Rank) -> None:
    rank.shell.user_ns["seen"] = seen = threading.Event()

    def script(pool: Pool) -> None:
        cell = pool.start("print('begun')\nassert seen.wait(20)\nprint('ended')")
        assert pool.read(cell, 6) == "begun\n"
        seen.set()
        assert pool.finish(cell).text() == "ended\n"

    rank.play(script)


def test_many_prints_make_few_messages(rank: Rank) -> None:
    began = monotonic()
    ran = rank.run("for i in range(20000): print('line', i)")
    seconds = monotonic() - began
    text = ran.text()
    assert text == "".join(f"line {i}\n" for i in range(20000))
    # A message leaves after each interval and with each batch, however long a slow machine needs for the cell.
    most = seconds / INTERVAL + len(text) / BATCH
    assert sum(name == "Output" for name, _ in rank.engine.log) < most + 10


def test_a_writer_that_goes_on_while_a_batch_is_sent_fills_the_next_one() -> None:
    begun, goes_on, sizes = threading.Event(), threading.Event(), list[int]()
    capture: OutputQueue

    def post(topic: str, body: bytes) -> None:
        output = codec.decode_to_pool(body)
        assert isinstance(output, Output)
        sizes.append(sum(len(c.text) for c in output.chunks if isinstance(c, Stream)))
        if len(sizes) == 1:
            begun.set()
            assert goes_on.wait(PATIENCE)
        elif sum(sizes) < 3 * BATCH:
            capture.write("stdout", "a line\n")  # as if a thread wrote while this message is sent

    capture = OutputQueue(PostingEngine(post))
    capture.start()
    capture.write("stdout", "x" * BATCH)
    assert begun.wait(PATIENCE)
    capture.write("stdout", "y" * BATCH)
    goes_on.set()
    capture.close()
    assert sizes[:2] == [BATCH, BATCH]
    assert len(sizes) <= 4


def test_all_output_comes_before_the_end(rank: Rank) -> None:
    rank.run("print('x')\n1 / 0")
    names = [name for name, _ in rank.engine.log]
    assert names.index("Output") < names.index("CellDone")


def test_total_counts_bytes(rank: Rank) -> None:
    rank.run("print('ä' * 10, end='')")
    outputs = [mail for name, mail in rank.engine.log if name == "Output"]
    assert outputs[-1].total == 20


def test_totals_begin_anew_with_each_cell(rank: Rank) -> None:
    rank.run("print('x' * 1000)")
    rank.run("print('y', end='')")
    outputs = [mail for name, mail in rank.engine.log if name == "Output"]
    assert outputs[-1].total == 1
    assert outputs[-1].cell == "cell-1"  # the second play of a pool that counts from zero again


def test_a_monstrous_write_is_taken_apart(capture: OutputQueue, sent: Sent) -> None:
    text = "x" * (3 * PIECE + 17)
    capture.write("stdout", text)
    capture.flush()
    assert sent.text == text
    assert (
        max(len(c.text) for o in sent.outputs for c in o.chunks if isinstance(c, Stream)) <= (1 << 20) + PIECE
    )


def test_surrogates_do_not_break_the_wire(rank: Rank) -> None:
    assert "\\udc80" in rank.run("print('a\\udc80b')").text()


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_of_a_cell_may_print(rank: Rank) -> None:
    ran = rank.run(
        "import threading\n"
        "def work(i):\n    for j in range(200): print(f'{i}:{j}')\n"
        "threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()"
    )
    lines = ran.text().split("\n")
    for i in range(4):
        assert [text for text in ran.text().replace("\n\n", "\n").split("\n") if text.startswith(f"{i}:")]
    assert sum(line.count(":") for line in lines) == 800


def test_output_after_the_end_belongs_to_the_cell_that_started_its_thread(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()

    def script(pool: Pool) -> None:
        cell = pool.start(
            "import threading\n"
            "def late():\n    go.wait()\n    print('late')\n    go.clear()\n    go.wait()\n    print('later')\n"
            "thread = threading.Thread(target=lambda: threading.Thread(target=late).start())\nthread.start()\n"
            "print('in time')"
        )
        assert pool.finish(cell).text() == "in time\n"
        go.set()
        assert late_of(pool, cell, 5) == "late\n"
        other = pool.start("go.set()\nwhile go.is_set(): pass")
        assert late_of(pool, cell, 6) == "later\n"
        go.clear()
        assert pool.finish(other).text() == ""

    rank.play(script)


def late_of(pool: Pool, cell: str, length: int) -> str:
    text = ""
    while len(text) < length:
        late = pool.expect(Late)
        assert late.cell == cell
        text += "".join(c.text for c in late.chunks if isinstance(c, Stream))
    return text


def test_a_finalizer_may_print_anywhere(capture: OutputQueue, sent: Sent) -> None:
    with capture._lock:  # as if the collector ran inside of write
        capture.write("stdout", "from __del__")
    capture.flush()
    assert sent.text == "from __del__"


def test_finalizer_that_prints_under_the_lock_waits_for_no_reader(sent: Sent) -> None:
    reading, owned = threading.Event(), threading.Event()
    got: list[bool] = []

    class Pipes:
        readers = ()
        lock = threading.RLock()

        def read(self, limit: int, receive: object) -> Iterator[PipeText]:
            if threading.current_thread() is reader:
                reading.set()
                assert owned.wait(PATIENCE)
                got.append(capture._lock.acquire(timeout=PATIENCE))  # as for each piece
                if got[0]:
                    capture._lock.release()
            return iter(())

    capture = OutputQueue(sent, fds=cast(FdCapture, Pipes()))
    capture.start()
    reader = threading.Thread(target=capture._drain_fds)
    reader.start()
    assert reading.wait(PATIENCE)
    with capture._lock:  # as if the collector ran inside of acknowledge
        owned.set()
        capture.write("stdout", "from __del__")
    reader.join()
    capture.close()
    assert got == [True]
    assert sent.text == "from __del__"


# -- the window -------------------------------------------------------------------------------------------------------


def test_a_writer_waits_for_the_pool_and_goes_on(rank: Rank) -> None:
    source = "for i in range(3000): print('x' * 9999)\n'done'"

    def script(pool: Pool) -> None:
        cell = pool.start(source)
        received = 0
        while received < WINDOW - PIECE:  # without credit the rank stops at the window
            received = pool.expect(Output).total
        assert received <= WINDOW
        pool.engine.settle()
        assert rank.agent._main_status.state == "running"
        pool.engine.mail(Acknowledge(cell, received))
        assert len(pool.finish(cell).text()) == 3000 * 10000 - received

    rank.play(script)


def test_an_interrupt_breaks_the_wait(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("while True: print('x' * 9999)")
        while pool.expect(Output).total < WINDOW - PIECE:
            pass
        pool.engine.interrupt()
        done = pool.expect(CellDone)
        assert done.error is not None
        assert done.error.interrupted
        assert done.cell == cell
        assert pool.run("print('next')").text() == "next\n"

    rank.play(script)


LATE = 3000 * 10000
WRITES_LATE = """\
import threading
def write():
    go.wait()
    for i in range(3000): print('x' * 9999)
threading.Thread(target=write).start()
"""


def late_up_to_the_window(pool: Pool, cell: str) -> int:
    """Receive output until the window is full. Returns how many bytes that is."""
    received = 0
    while received < WINDOW - PIECE:
        late = pool.expect(Late)
        assert late.cell == cell
        received = late.total
    with contextlib.suppress(queue.Empty):  # a moment for a rank that goes on
        while True:
            late = pool.engine.posted.get(timeout=0.3)
            assert isinstance(late, Late)
            received = late.total
    assert received <= WINDOW + PIECE
    return received


def the_rest_of_the_late(pool: Pool, received: int, total: int) -> None:
    while received < total:
        received = pool.expect(Late).total
        pool.engine.mail(AcknowledgeLate(received))
    assert received == total


def test_a_thread_that_outlives_its_cell_waits_for_the_pool_too(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()

    def script(pool: Pool) -> None:
        cell = pool.start(WRITES_LATE)
        pool.finish(cell)
        go.set()
        received = late_up_to_the_window(pool, cell)
        assert pool.run("print('next')").text() == "next\n"  # which has a window of its own
        pool.engine.mail(AcknowledgeLate(received))
        the_rest_of_the_late(pool, received, LATE)

    rank.play(script)


def test_a_late_writer_does_not_wait_for_what_a_lost_coordinator_took_along(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()

    def script(pool: Pool) -> None:
        cell = pool.start(WRITES_LATE)
        pool.finish(cell)
        go.set()
        received = late_up_to_the_window(pool, cell)
        pool.engine.mail(ResendFrom(()))
        the_rest_of_the_late(pool, received, LATE)

    rank.play(script)


def test_a_task_that_waits_for_room_gets_it_while_its_rank_leaves(rank: Rank) -> None:
    """No interrupt would end its wait, which is between cells, and it waits on the main thread."""
    rank.shell.user_ns["go"] = go = asyncio.Event()

    def script(pool: Pool) -> None:
        cell = pool.start(
            "import asyncio\n"
            "async def write():\n    await go.wait()\n    for i in range(3000): print('x' * 9999)\n"
            "task = asyncio.create_task(write())"
        )
        pool.finish(cell)
        rank.loop.call_soon_threadsafe(go.set)
        received = late_up_to_the_window(pool, cell)
        pool.engine.leave()
        pool.engine.settle()
        pool.engine.mail(AcknowledgeLate(received))
        the_rest_of_the_late(pool, received, LATE)
        assert rank.left.wait(PATIENCE)

    rank.play(script)


class Waiting(threading.Condition):
    """Condition that shows when a thread waits."""

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self.entered = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.entered.set()  # with the lock held, which only the wait itself gives away
        return super().wait_for(predicate, timeout)


def test_late_output_comes_after_the_end_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    mails: list[Any] = []
    capture = OutputQueue(PostingEngine(lambda topic, body: mails.append(codec.decode_to_pool(body))))
    capture.sent.register("cell")
    capture.begin_cell("cell")
    capture.write("stdout", "in time")
    real, queued = capture.sent.output, threading.Event()

    def write_late() -> None:
        set_current_cell("cell")
        capture.write("stdout", "late")
        queued.set()
        capture.flush()

    writer = threading.Thread(target=write_late)

    def output(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        sent = real(*arguments, **options)
        writer.start()
        assert queued.wait(PATIENCE)
        return sent

    monkeypatch.setattr(capture, "flush", lambda: None)  # the rest is sent after the cell is over
    monkeypatch.setattr(capture.sent, "output", output)
    capture.finish(CellDone("cell", None, 0.0))
    writer.join(PATIENCE)
    capture.start()
    capture.close()
    assert [type(mail) for mail in mails] == [Output, CellDone, Late]


def test_text_that_waits_for_room_is_late_when_its_cell_ends_meanwhile() -> None:
    capture: OutputQueue
    mails: list[Any] = []
    late = threading.Event()

    def post(topic: str, body: bytes) -> None:
        mails.append(codec.decode_to_pool(body))
        if isinstance(mails[-1], Late):
            late.set()

    def write() -> None:
        set_current_cell("cell")
        capture.write("stdout", "waits")

    capture = OutputQueue(PostingEngine(post))
    capture._room = waiting = Waiting(capture._lock)
    capture.sent.register("cell")
    capture.begin_cell("cell")
    for _ in range(WINDOW // PIECE):
        capture.write("stdout", "x" * PIECE)
    capture.start()
    writer = threading.Thread(target=write)
    writer.start()
    assert waiting.entered.wait(PATIENCE)
    capture.finish(CellDone("cell", None, 0.0))
    assert late.wait(PATIENCE)
    capture.close()
    writer.join(PATIENCE)
    *outputs, done, last = mails
    assert [type(mail) for mail in outputs] == [Output] * len(outputs)
    assert done == CellDone("cell", None, 0.0, total=WINDOW)
    assert last == Late("cell", (Stream("stdout", "waits"),), 5)


def test_late_output_on_its_way_leaves_no_room_for_more() -> None:
    arrived, go_on = threading.Event(), threading.Event()
    totals: list[int] = []

    def post(topic: str, body: bytes) -> None:
        mail = codec.decode_to_pool(body)
        if isinstance(mail, Late):
            totals.append(mail.total)
            arrived.set()
            assert go_on.wait(PATIENCE)

    capture = OutputQueue(PostingEngine(post))
    capture.begin_cell("cell")
    capture.finish(CellDone("cell", None, 0.0))
    for _ in range(WINDOW // PIECE):
        capture.write("stdout", "x" * PIECE)
    sender = threading.Thread(target=capture.flush)
    sender.start()
    assert arrived.wait(PATIENCE)
    # One message is in the log's total, the others are on their way.
    assert capture._late_ahead() >= WINDOW
    go_on.set()
    sender.join(PATIENCE)
    assert totals[-1] == capture._late_ahead() == WINDOW
    capture.start()
    capture.close()


def test_late_credit_that_was_for_a_former_process_is_ignored(capture: OutputQueue) -> None:
    capture.acknowledge_late(1 << 40)
    assert capture._late_taken == 0


def test_credit_of_an_older_cell_is_ignored(capture: OutputQueue) -> None:
    capture.begin_cell("new")
    capture.acknowledge("old", 1 << 40)
    assert capture._taken == 0


def test_the_end_of_the_rank_frees_writers(sent: Sent) -> None:
    capture = OutputQueue(sent)
    capture.start()
    capture.sent.register("cell")
    capture.begin_cell("cell")

    def write() -> None:
        for _ in range(100):
            capture.write("stdout", "x" * PIECE)

    writer = threading.Thread(target=write)
    writer.start()
    while sum(o.total for o in sent.outputs[-1:]) < WINDOW - PIECE:
        assert sent.some.wait(PATIENCE)
        sent.some.clear()
    capture.close()
    writer.join(PATIENCE)
    assert not writer.is_alive()


STATEMENTS = [
    "self._entries.append(entry)",
    "self._queued += size",
    "self._total += size",
    "if self._woken and",
    "self._woken = True",
    "self._urgent = ",
    "self._wake()",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_an_interrupt_anywhere_in_writing_leaves_no_gap(
    capture: OutputQueue, sent: Sent, statement: str
) -> None:
    lines, first = inspect.getsourcelines(OutputQueue._put)
    target = first + next(i for i, line in enumerate(lines) if line.strip().startswith(statement))
    raised = threading.Event()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not OutputQueue._put.__code__:
            return None
        if event == "line" and frame.f_lineno == target and not raised.is_set():
            raised.set()
            raise KeyboardInterrupt
        return trace

    def interrupted() -> None:
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(3):
                capture.write("stdout", "abc")

    capture.sent.register("cell")
    capture.begin_cell("cell")
    writer = threading.Thread(target=interrupted)
    writer.start()
    writer.join()
    assert raised.is_set()
    for _ in range(2):
        capture.write("stdout", "defg")
        capture.flush()
    reached = 0
    for output in sent.outputs:
        assert output.before == reached
        reached = output.total
    assert sent.text.endswith("defgdefg")


def test_what_is_larger_than_the_window_passes(capture: OutputQueue, sent: Sent) -> None:
    capture.begin_cell("cell")
    capture.put(Display({"text/html": "x" * (WINDOW + 1)}, {}))
    capture.flush()
    assert isinstance(sent.outputs[0].chunks[0], Display)


# -- the streams' face ------------------------------------------------------------------------------------------------


def test_streams_look_like_text_files(capture: OutputQueue, sent: Sent) -> None:
    stream = RankStream(capture, "stdout", None)
    assert isinstance(stream, io.TextIOBase)
    assert not stream.isatty()
    assert stream.writable()
    assert stream.encoding == "utf-8"
    assert stream.write("four") == 4
    stream.writelines(["a", "b"])
    stream.close()
    assert not stream.closed
    print("after close", file=stream, flush=True)
    with pytest.raises(TypeError, match="must be str, not bytes"):
        stream.write(b"x")  # type: ignore[arg-type]  # the mistake is the test
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()
    capture.flush()
    assert sent.text == "fourabafter close\n"


def test_bytes_may_be_torn_apart(capture: OutputQueue, sent: Sent) -> None:
    stream = RankStream(capture, "stdout", None)
    raw = "ä".encode()
    stream.buffer.write(raw[:1])
    stream.buffer.write(raw[1:])
    stream.buffer.flush()
    capture.flush()
    assert sent.text == "ä"


def test_the_interval_is_short() -> None:
    assert INTERVAL <= 0.05


# -- below Python -----------------------------------------------------------------------------------------------------


def test_subprocesses_write_into_the_cell(fd_rank: Rank) -> None:
    ran = fd_rank.run(
        "import subprocess, sys, os\n"
        "print('1')\n"
        "subprocess.run(['echo', '2'])\n"
        "print('3')\n"
        "os.system('echo 4; echo e >&2')\n"
        "print('5', file=sys.stdout)\n"
        "subprocess.run(['echo', '6'], stdout=sys.stdout, stderr=sys.stderr);"
    )
    assert ran.text() == "1\n2\n3\n4\n5\n6\n"
    assert ran.text("stderr") == "e\n"


def test_c_code_writes_into_its_cell(fd_rank: Rank) -> None:
    fd_rank.run("import ctypes; libc = ctypes.CDLL(None)")
    assert fd_rank.run("libc.printf(b'from C\\n');").text() == "from C\n"
    assert fd_rank.run("1").text() == ""


def test_the_interpreters_own_streams_are_captured(fd_rank: Rank) -> None:
    ran = fd_rank.run("import os\nos.write(1, b'out\\n')\nos.write(2, b'err\\n');")
    assert (ran.text(), ran.text("stderr")) == ("out\n", "err\n")


def test_much_output_of_a_subprocess_arrives(fd_rank: Rank) -> None:
    ran = fd_rank.run(
        f"import subprocess\nsubprocess.run([{sys.executable!r}, '-c', 'for i in range(200000): print(i)']);"
    )
    assert ran.text() == "".join(f"{i}\n" for i in range(200000))


def test_a_subprocess_waits_for_the_pool_too(fd_rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start(
            "import subprocess\nsubprocess.run('head -c 30000000 /dev/zero | tr \"\\\\0\" x', shell=True);"
        )
        received = 0
        while received < WINDOW:
            received = pool.expect(Output).total
        assert received <= WINDOW + PIECE
        pool.engine.mail(Acknowledge(cell, received))
        assert len(pool.finish(cell).text()) == 30000000 - received

    fd_rank.play(script)


def test_what_a_subprocess_wrote_comes_before_the_end_of_its_cell(fd_rank: Rank) -> None:
    """Also if the pool has not read the output before it."""
    written = fd_rank.shell.user_ns["written"] = threading.Event()

    def script(pool: Pool) -> None:
        cell = pool.start(
            f"import subprocess\nsubprocess.run('head -c {WINDOW + 50000} /dev/zero | tr \"\\\\0\" x', shell=True)\nwritten.set()"
        )
        received = 0
        while received < WINDOW:
            received = pool.expect(Output).total
        assert written.wait(PATIENCE)  # the rest is in the pipe
        threading.Timer(0.2, pool.engine.mail, [Acknowledge(cell, received)]).start()
        assert len(pool.finish(cell).text()) == WINDOW + 50000 - received

    fd_rank.play(script)


def test_a_process_that_outlives_its_cell_still_arrives(fd_rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start(
            "import subprocess\np = subprocess.Popen('read x; echo late', shell=True, stdin=subprocess.PIPE)"
        )
        pool.finish(cell)
        fd_rank.shell.user_ns["p"].communicate(b"\n")
        assert late_of(pool, cell, 5) == "late\n"

    fd_rank.play(script)


def test_a_process_that_outlives_its_cell_waits_for_the_pool_too(fd_rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start(
            "import subprocess\np = subprocess.Popen('read x; head -c 30000000 /dev/zero | tr \"\\\\0\" x', shell=True, "
            "stdin=subprocess.PIPE)"
        )
        pool.finish(cell)
        process = fd_rank.shell.user_ns["p"]
        process.stdin.write(b"\n")
        process.stdin.close()
        received = late_up_to_the_window(pool, cell)
        pool.engine.mail(AcknowledgeLate(received))
        the_rest_of_the_late(pool, received, 30000000)
        assert process.wait(PATIENCE) == 0

    fd_rank.play(script)


def test_bytes_left_in_the_pipe_for_want_of_room_belong_to_the_cell_before_the_next(
    fd_rank: Rank,
) -> None:
    total = WINDOW + 50000

    def script(pool: Pool) -> None:
        cell = pool.start(
            f"import subprocess\np = subprocess.Popen('read x; head -c {total - 4} /dev/zero | tr \"\\\\0\" x; echo END', "
            "shell=True, stdin=subprocess.PIPE)"
        )
        pool.finish(cell)
        late_process = fd_rank.shell.user_ns["p"]
        late_process.communicate(
            b"\n", timeout=PATIENCE
        )  # the pool takes nothing, and the rest is in the pipe
        assert pool.run("print('next')").text() == "next\n"
        late = [mail for name, mail in fd_rank.engine.log if name == "Late"]
        assert {mail.cell for mail in late} == {cell}
        assert late[-1].total == total
        assert late[-1].chunks[-1].text.endswith("xEND\n")

    fd_rank.play(script)


def test_reading_standard_input_ends_at_once(fd_rank: Rank) -> None:
    assert fd_rank.run("import os\nos.read(0, 1)").done.error is None


def test_children_by_multiprocessing_print_too(fd_rank: Rank) -> None:
    ran = fd_rank.run(
        "import multiprocessing as mp\n"
        "def work(i):\n    print('child', i)\n"
        "p = mp.get_context('fork').Process(target=work, args=(7,))\n"
        "p.start(); p.join()\ncode = p.exitcode\np.close()\ncode"
    )
    assert ran.text() == "child 7\n"
    assert ran.done.value_repr == "0"


def test_descriptors_are_given_back() -> None:
    script = (
        "import os\nfrom hvdlab.kernel_ext.rank.pipes import FdCapture\n"
        "c = FdCapture()\nos.write(1, b'captured')\n"
        "with c.lock: text = ''.join(p.text for p in c.read(100))\n"
        "c.close()\nos.write(1, b'back: ' + text.encode())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert ran.stdout == "back: captured"


def test_a_gibberish_stream_is_replaced_not_lost(fd_rank: Rank) -> None:
    ran = fd_rank.run("import os\nos.write(1, b'a\\xffb');")
    assert ran.text() == "a\ufffdb"


def test_ranks_streams_name_their_descriptor(fd_rank: Rank) -> None:
    assert fd_rank.run("import sys\nsys.stdout.fileno(), sys.stderr.fileno()").done.value_repr == "(1, 2)"


def test_many_ranks_have_smaller_windows() -> None:
    assert [window_of(ranks) for ranks in (1, 8, 16, 32, 256)] == [
        8 << 20,
        8 << 20,
        4 << 20,
        2 << 20,
        2 << 20,
    ]


def test_exit_ends_process_where_no_thread_can_start(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[int] = []
    capture = OutputQueue(sent)
    capture.start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", ended.append)
        patch.setattr(threading.Thread, "start", no_thread)
        ExitFlush(capture, cast(EngineMail, None))._leave(3)
    capture.close()
    assert ended == [3]


def test_output_of_an_earlier_cell_comes_before_the_end_of_the_cell_that_ran_meanwhile() -> None:
    mails: list[Any] = []
    # Not started: no thread but this one sends.
    capture = OutputQueue(PostingEngine(lambda topic, body: mails.append(codec.decode_to_pool(body))))

    def write_late() -> None:
        set_current_cell("first")
        capture.write("stdout", "late")

    for cell in ("first", "second"):
        capture.sent.register(cell)
        capture.begin_cell(cell)
        if cell == "second":
            writer = threading.Thread(target=write_late)
            writer.start()
            writer.join(PATIENCE)
        capture.finish(CellDone(cell, None, 0.0))
    assert [(type(mail), mail.cell) for mail in mails] == [
        (CellDone, "first"),
        (Late, "first"),
        (CellDone, "second"),
    ]
    capture.start()
    capture.close()

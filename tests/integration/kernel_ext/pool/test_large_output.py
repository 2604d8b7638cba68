"""A rank that writes without end, and values of gigabytes: the notebook's process stays small and quick."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import pytest

from hvdlab.kernel_ext.notebook.output.limit import LimitedSink
from hvdlab.kernel_ext.notebook.output.merge import LineMerger, MergingSink
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.compare import SharedRange
from hvdlab.kernel_ext.wire.values import SharedBuffer, SharedBufferReader
from hvdlab.magics.screens import NotebookScreen
from support.pool_probe import PoolProbe

StartPool = Callable[..., Pool]
MB = 1_000_000

FLOOD = """
import sys
line = 'x' * 79 + chr(10)
rank = int(__import__('os').environ['RANK'])
if rank == 0:
    for _ in range({megabytes}):
        sys.stdout.write(line * 12_500)
    print('the end')
rank
"""


@dataclass
class Frontend:
    """Output that a notebook would get."""

    text: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)

    def stream(self, name: str, text: str) -> None:
        self.text.append(text)

    def display(
        self, data: dict[str, object], metadata: dict[str, object], display_id: str, *, update: bool = False
    ) -> None:
        self.live.append(str(data["text/plain"]))

    def clear(self, wait: bool) -> None:
        pass


def notebook_sink(frontend: Frontend, ranks: tuple[int, ...], limit: int = 2 * MB) -> LimitedSink:
    return LimitedSink(MergingSink(LineMerger(ranks), NotebookScreen(frontend, ranks, "c")), ranks, limit)


@contextmanager
def peak_memory(*pids: int) -> Iterator[list[int]]:
    """Yield bytes by which the largest of these processes, this one included, has grown at most."""
    processes = [psutil.Process(pid) for pid in (os.getpid(), *pids)]
    before = [process.memory_info().rss for process in processes]
    growth, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            now = [process.memory_info().rss for process in processes]
            growth[0] = max(growth[0], *(a - b for a, b in zip(now, before, strict=True)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        stop.set()
        thread.join()


def flood(pool: Pool, megabytes: int, most: int) -> None:
    frontend = Frontend()
    begun = time.monotonic()
    with peak_memory(PoolProbe(pool).coordinator.pid) as growth:
        results = pool.run(
            FLOOD.format(megabytes=megabytes), out=notebook_sink(frontend, pool.ranks), label="[7]"
        )
    seconds = time.monotonic() - begun
    print(f"{megabytes} MB in {seconds:.1f} s, {growth[0] / MB:.0f} MB more memory", file=sys.stderr)
    assert list(results) == list(pool.ranks)
    assert growth[0] < most
    shown = "".join(frontend.text)
    share = 2 * MB // len(pool.ranks)
    assert share < len(shown) < share + MB // 4
    assert "[0] the end\n" in shown
    assert "`%hvd_output 7 --to FILE` writes all of it" in shown
    recorder = pool.transcripts.find("7")
    assert recorder is not None
    assert recorder.transcript.lost == 0
    directory = recorder.transcript.directory
    assert directory is not None
    assert f"it is in {directory}" in shown
    assert (directory / "rank-0.txt").stat().st_size == megabytes * MB + len("the end\n")
    assert pool.run("'next'")[0] == "next"


def test_a_flood_is_cut_and_kept(start_pool: StartPool) -> None:
    pool = start_pool(2)
    flood(pool, 60, most=60 * MB)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_gigabyte_of_output(start_pool: StartPool) -> None:
    pool = start_pool(4)
    flood(pool, 1000, most=100 * MB)


def test_a_flood_can_be_interrupted(start_pool: StartPool) -> None:
    pool = start_pool(2)
    frontend = Frontend()
    sink = notebook_sink(frontend, pool.ranks)
    run = pool.start_run("while True: print('y' * 1000)", out=sink, label="[8]")
    recorder = pool.transcripts.find("8")
    assert recorder is not None
    while recorder.transcript.total < 8 * MB:
        assert not run.done
        time.sleep(0.01)
    run.interrupt()
    assert run.wait(30).interrupted
    assert {error.ename for error in run.wait(1).errors.values()} == {"KeyboardInterrupt"}
    assert pool.run("1 + 1")[0] == 2


@pytest.mark.soak
def test_a_rank_that_is_killed_in_a_flood_ends_the_cell(start_pool: StartPool) -> None:
    pool = start_pool(2)
    frontend = Frontend()
    run = pool.start_run(
        "import os, time\nif os.environ['RANK'] == '0':\n    while True: print('z' * 1000)",
        out=notebook_sink(frontend, pool.ranks),
        label="[9]",
    )
    recorder = pool.transcripts.find("9")
    assert recorder is not None
    while recorder.transcript.total < 4 * MB:
        assert not run.done
        time.sleep(0.01)
    os.kill(next(status.pid for status in pool.status() if status.rank == 0), signal.SIGKILL)
    assert list(run.wait(30).deaths) == [0]
    assert pool.run("1 + 1")[1] == 2


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_large_value_is_pulled_and_pushed_without_copies(start_pool: StartPool) -> None:
    numpy = pytest.importorskip("numpy")
    pool = start_pool(2)
    pool.run("import numpy as np, os\nx = np.full(8_000_000, int(os.environ['RANK']) + 1)")
    with peak_memory() as growth:
        x = pool.pull("x", [1])[1]
    assert x.sum() == 16_000_000
    assert growth[0] < 64 * MB + 60 * MB
    x[0] = 7  # it is the notebook's own
    pool.push(y=x, z="small")
    assert list(pool.run("(int(y.sum()), z)")) == [(16_000_005, "small")] * 2
    both = pool.pull("x[:1_000_000]")
    assert {rank: int(value.sum()) for rank, value in both.items()} == {0: 1_000_000, 1: 2_000_000}
    assert numpy.array_equal(pool.pull("x[:3]")[0], [1, 1, 1])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_gibibytes_are_returned_and_pulled(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pool.run("import numpy as np\nx = np.ones(1 << 28)")
    with peak_memory(PoolProbe(pool).coordinator.pid) as growth:
        results = pool.run("x")
    assert growth[0] < 50 * MB
    with pytest.raises(IndexError, match=r"%hvd_pull NAME"):
        results[0]
    begun = time.monotonic()
    with peak_memory() as growth:
        assert pool.pull("x", [0])[0].sum() == 1 << 28
    seconds = time.monotonic() - begun
    print(f"2 GiB in {seconds:.1f} s, {growth[0] / MB:.0f} MB more memory", file=sys.stderr)
    assert growth[0] < (2 << 30) + 100 * MB


def test_a_value_of_another_host_comes_by_message(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    np = pytest.importorskip("numpy")
    pool = start_pool(2)
    pool.run("import numpy as np\nx = np.arange(1_000_000)")
    looks: list[object] = []

    def look(self: SharedBufferReader, piece: SharedRange, target: memoryview) -> None:
        looks.append(piece)
        raise PermissionError

    monkeypatch.setattr(SharedBufferReader, "read", look)
    assert {rank: int(x[-1]) for rank, x in pool.pull("x").items()} == {0: 999_999, 1: 999_999}
    assert len(looks) == 1
    monkeypatch.setattr(
        SharedBuffer, "write", lambda self, data: SharedRange(os.getpid(), 0, "nothing", len(data))
    )
    pool.push(y=np.arange(1_000_000))
    assert list(pool.run("int(y.sum())")) == [499_999_500_000] * 2
    monkeypatch.setenv("HVDLAB_HOST", "another")
    pool.push(y=pool.pull("x", [0])[0])
    assert list(pool.run("int(y.sum())")) == [499_999_500_000] * 2
    assert int(pool.pull("x", [1])[1].sum()) == 499_999_500_000
    assert len(looks) == 1


def test_what_does_not_fit_into_memory_is_refused(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy")
    pool = start_pool(2)
    pool.run("import numpy as np\nx = np.ones(1_000_000)")
    monkeypatch.setattr("hvdlab.kernel_ext.notebook.variables.transfer.available_memory", lambda: 40 << 20)
    with pytest.raises(
        LookupError, match=r"x takes 7\.6 MiB, and 15\.3 MiB for ranks 0,1 together, but only 40\.0 MiB"
    ):
        pool.pull("x")
    assert pool.pull("x", [1])[1].sum() == 1_000_000
    assert pool.run("1 + 1")[0] == 2


DIES_AT_SECOND_PIECE = """
import os, signal
from hvdlab.kernel_ext.rank.values import OutgoingTransfers
read, pieces = OutgoingTransfers.read, 0
def read_one(self, question):
    global pieces
    pieces += 1
    if pieces == 2 and os.environ['RANK'] == '1':
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, question)
OutgoingTransfers.read = read_one
x = b'x' * (200 << 20)
"""


def test_a_rank_that_dies_while_its_value_is_sent_is_told(start_pool: StartPool) -> None:
    pool = start_pool(2)
    assert pool.run(DIES_AT_SECOND_PIECE).ok
    with pytest.raises(LookupError, match="rank 1: x: it is lost"):
        pool.pull("x", [1])
    assert pool.run("1 + 1")[0] == 2

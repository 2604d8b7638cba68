"""A rank's output just before it was killed is shown, once and in order."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.cells import Chunk, Stream
from support.patience import HOUR, PATIENCE
from support.pool_probe import PoolProbe

StartPool = Callable[..., Pool]

LINES = "".join(f"line {i}\n" for i in range(1000))

WRITES = {
    "print": "for i in range(1000): print('line', i)",
    "stderr": "for i in range(1000): print('line', i, file=sys.stderr)",
    "fd 1": "for i in range(1000): os.write(1, b'line %d\\n' % i)",
    "fd 2": "for i in range(1000): os.write(2, b'line %d\\n' % i)",
}
ENDS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    "os._exit": ("os._exit(3)", "exit code 3"),
    "segmentation fault": ("ctypes.string_at(0)", "segmentation fault"),
    "abort": ("os.abort()", "abort() was called"),
}


class Listener(NullSink):
    """Listener that receives ranks' output."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, Chunk]] = []
        self.notes: list[str] = []

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self.chunks += [(rank, chunk) for chunk in chunks]

    def note(self, text: str, *, warning: bool = False) -> None:
        self.notes.append(text)

    def text(self, rank: int, *streams: str) -> str:
        return "".join(
            c.text for r, c in self.chunks if r == rank and isinstance(c, Stream) and c.name in streams
        )


def die(pool: Pool, *steps: str) -> Listener:
    """Have rank 1, a living one, do this, and die of it."""
    pool.repair()
    heard = Listener()
    source = "import os, sys, signal, ctypes\nif os.environ['RANK'] == '1':\n"
    results = pool.run(source + textwrap.indent("\n".join(steps), "    "), out=heard)
    assert not results.ok
    return heard


def test_each_line_before_a_kill_is_there_exactly_once(start_pool: StartPool) -> None:
    pool = start_pool(2)
    for name in WRITES:
        check_lines(pool, name, "SIGKILL")
    heard = die(
        pool,
        "from IPython.display import display",
        "print('one'); print('two', file=sys.stderr); display('three'); print('four')",
        "os.write(2, b'five')",
        ENDS["SIGKILL"][0],
    )
    shown: list[tuple[str, str]] = []
    for chunk in (chunk for rank, chunk in heard.chunks if rank == 1):
        name, text = (chunk.name, chunk.text) if isinstance(chunk, Stream) else ("display", "")
        if shown and shown[-1][0] == name:  # how texts are spread over messages is a matter of timing
            text = shown.pop()[1] + text
        shown.append((name, text))
    assert shown == [
        ("stdout", "one\n"),
        ("stderr", "two\n"),
        ("display", ""),
        ("stdout", "four\n"),
        ("stderr", "five"),
    ]


def test_each_line_before_other_ends_is_there_exactly_once(start_pool: StartPool) -> None:
    pool = start_pool(2)
    for end in ENDS:
        for name in ("print", "fd 2"):
            if end != "SIGKILL":
                check_lines(pool, name, end)


def test_so_it_is_of_ranks_that_the_fork_server_of_a_host_has_forked(start_pool: StartPool) -> None:
    pool = start_pool(2, launcher="ssh", hosts="localhost:2")
    for name in WRITES:
        check_lines(pool, name, "SIGKILL")
    check_lines(pool, "fd 2", "segmentation fault")


def check_lines(pool: Pool, name: str, end: str) -> None:
    kill, reason = ENDS[end]
    heard = die(pool, WRITES[name], kill)
    stream = "stderr" if name in ("stderr", "fd 2") else "stdout"
    assert heard.text(1, stream) == LINES, (name, end)
    assert heard.text(1, "stdout", "stderr") == LINES, (name, end)
    assert not [note for note in heard.notes if "lost with it" in note]
    assert pool.lost[1] == reason
    assert "line 999" not in pool.last_words(1)


def test_megabytes_that_were_not_sent_are_there_and_not_again_later(start_pool: StartPool) -> None:
    """Written faster than it is sent: the rank is killed with much in its queue."""
    pool = start_pool(2)
    heard = die(
        pool,
        "for i in range(60): sys.stdout.write(f'{i:03}' + 'x' * 99_996 + '\\n')",
        ENDS["SIGKILL"][0],
    )
    lines = heard.text(1, "stdout").splitlines()
    assert [line[:3] for line in lines] == [f"{i:03}" for i in range(60)]
    assert {len(line) for line in lines} == {99_999}
    heard = die(pool, "print('now')", ENDS["SIGKILL"][0])
    assert heard.text(1, "stdout") == "now\n"


def test_a_rank_that_dies_between_cells_leaves_its_standard_error(
    start_pool: StartPool, tmp_path: Path
) -> None:
    """No cell waits for its output: it is among its last words, as the reason of a crash can be there."""
    pool = start_pool(2)
    over = tmp_path / "over"
    os.mkfifo(over)
    pool.run(
        "import ctypes, os, signal, sys, threading\n"
        "def end():\n"
        # No thread takes the lock from this one, as slow as it may be between its write and its end.
        f"    sys.setswitchinterval({HOUR})\n"
        f"    open({str(over)!r}).read()  # until the cell has ended\n"
        "    ctypes.PyDLL(None).write(2, b'bad handle\\n', 11)  # keeps the lock\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ['RANK'] == '1': threading.Thread(target=end, daemon=True).start()"
    )
    over.write_text("yes")
    died(pool, 1)
    assert pool.last_words(1) == "bad handle"


def died(pool: Pool, rank: int) -> None:
    changed = PoolProbe(pool).group._changed
    with changed:
        assert changed.wait_for(lambda: rank in pool.lost, PATIENCE)


def test_ranks_whose_fork_server_was_replaced_leave_theirs(start_pool: StartPool) -> None:
    pool = start_pool(2)
    warm = PoolProbe(pool).fork_server
    before = warm.pid
    os.kill(before, signal.SIGKILL)
    with warm._changed:
        assert warm._changed.wait_for(lambda: warm.lost is None and warm.pid != before, PATIENCE)
    warm.wait_loaded(Deadline(PATIENCE))
    heard = die(pool, WRITES["print"], ENDS["SIGKILL"][0])
    assert heard.text(1, "stdout") == LINES

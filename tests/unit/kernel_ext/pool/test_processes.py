"""Reports of a process that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.cells.cell_events import Event, ProcessSeen
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.output.stack_text import called
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.notebook.stack_probe import ELSEWHERE, StackProbe, describe_state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("T", "stopped (SIGSTOP); `kill -CONT 7` lets it go on"),
        ("t", "stopped by a debugger"),
        ("Z", "its process has ended"),
        ("D", "waits for a device or file system (nfs_wait)"),
        ("R", ""),
        ("S", ""),
    ],
)
def test_states_in_words(tmp_path: Path, state: str, said: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text(f"7 (a) b) {state} 1 7 7 0")
    (tmp_path / "7/wchan").write_text("nfs_wait")
    assert describe_state(7, tmp_path) == said


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    assert describe_state(7, tmp_path) == "its process has ended"


DUMP = (
    'Current thread 0x00007f (most recent call first):\n  File "/usr/lib/re.py", line 10 in match\n'
    '  File "<cell [4]>", line 4 in slow\n  File "<cell [4]>", line 6 in <module>\n'
)
OURS = '  File "/x/hvdlab/kernel_ext/rank/cell_executor.py", line 1 in run\n'


def test_a_dump_is_read_once_it_is_complete() -> None:
    assert called(DUMP) == ""
    assert called(DUMP + OURS) == "cell [4] line 4 in slow"
    assert called(OURS) == ""


class DistantRanks:
    """Ranks of another host, to which no mail goes."""

    def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None: ...

    def loss_reason(self, rank: int) -> str:
        return ""

    def losses(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}

    def local_pid(self, rank: int) -> None:
        return None


class CellFindings(CellHandle):
    """Handle of a cell that keeps the findings."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def post(self, event: Event) -> None:
        self.events.append(event)


def test_probe_without_thread_reports_ranks_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ranks, found = DistantRanks(), CellFindings()
    probe = StackProbe(ranks, RankRequests(ranks, ranks), ranks).watch()
    probe.handle = found
    monkeypatch.setattr(threading.Thread, "start", fail)
    # The thread that drives the cell calls it: an error would end the drive, and not the cell.
    probe.probe_processes((1, 3))
    assert found.events == [ProcessSeen(1, ELSEWHERE), ProcessSeen(3, ELSEWHERE)]

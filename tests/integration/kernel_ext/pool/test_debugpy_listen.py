"""Cells that call ``debugpy.listen`` in a rank, and a debugger that connects there: the rank goes on answering the pool."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.debugger.hub import connections_of
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.debug import DebugOpened, FromServer
from support.jupyter.dap_port import DapPort
from support.patience import PATIENCE

pytest.importorskip("debugpy")

StartPool = Callable[..., Pool]

LISTEN = "import debugpy\nmemory = 'kept'\ndebugpy.listen(('127.0.0.1', 0))[1]"


def attached(port: int) -> DapPort:
    debugger = DapPort(port)
    assert debugger.ask("initialize", adapterID="x", pathFormat="path")["success"]
    attach = debugger.begin("attach", justMyCode=True)
    debugger.wait(lambda one: one.get("event") == "initialized")
    assert debugger.ask("configurationDone")["success"]
    assert debugger.answer(attach)["success"]
    return debugger


@pytest.mark.timeout(180)
def test_a_rank_that_has_stopped_answers_and_can_be_interrupted(
    start_pool: StartPool, tmp_path: Path
) -> None:
    module = tmp_path / "of_the_user.py"
    module.write_text("def double(n):\n    y = n * 2\n    return y\n")
    pool = start_pool(2)
    (port,) = pool.run(LISTEN, ranks=[1])
    with attached(port) as debugger:
        debugger.ask("setBreakpoints", source={"path": str(module)}, breakpoints=[{"line": 3}])
        run = pool.start_run(
            f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport of_the_user\nof_the_user.double(4)"
        )
        stopped = debugger.wait(lambda one: one.get("event") == "stopped")["body"]
        # hvdlab's own threads are none of those that a debugger stops.
        assert [one["name"] for one in debugger.ask("threads")["body"]["threads"]] == ["MainThread"]
        frame = debugger.ask("stackTrace", threadId=stopped["threadId"])["body"]["stackFrames"][0]
        assert (frame["source"]["path"], frame["line"]) == (str(module), 3)
        assert debugger.ask("evaluate", expression="y", frameId=frame["id"])["body"]["result"] == "8"
        assert "of_the_user.py line 3 in double" in str(pool.where())
        run.interrupt()
        results = run.wait(PATIENCE)
        assert {rank: error.ename for rank, error in results.errors.items()} == {1: "KeyboardInterrupt"}
    assert list(pool.run("memory", ranks=[1])) == ["kept"]


def test_the_cell_that_imports_debugpy_has_no_thread_of_hvdlab_s_to_stop(start_pool: StartPool) -> None:
    source = """
import threading
def stoppable(): return [t.name for t in threading.enumerate() if t.name.startswith('hvdlab') and not getattr(t, 'pydev_do_not_trace', False)]
before = len(stoppable())
import debugpy
before, stoppable(), threading.main_thread().__dict__.get('pydev_do_not_trace')
"""
    (found,) = start_pool(1).run(source)
    before, after, main = found
    assert before > 0
    assert (after, main) == ([], None)


class Mail:
    """Owner of a session that keeps the messages of debug servers."""

    def __init__(self) -> None:
        self.mail: queue.SimpleQueue[FromServer] = queue.SimpleQueue()

    def heard(self, rank: int, mail: FromServer) -> None:
        self.mail.put(mail)

    def gone(self, rank: int, reason: str) -> None:
        pass


@pytest.mark.timeout(180)
def test_jupyterlabs_debugger_leaves_such_a_rank_out_and_says_why(start_pool: StartPool) -> None:
    pool = start_pool(1)
    pool.run(LISTEN)
    owner = Mail()
    session = connections_of(pool.client).session(owner)
    session.open(0)
    opened = owner.mail.get(timeout=PATIENCE)
    assert isinstance(opened, DebugOpened)
    assert opened.error == "debugpy.listen() or debugpy.connect() has brought another debugger to it"
    session.close()
    assert list(pool.run("memory")) == ["kept"]

"""Answers of a rank while it is idle, busy or stuck, and how it leaves."""

from __future__ import annotations

import builtins
import getpass
import linecache
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jedi  # type: ignore[import-untyped]  # has no types
import parso
import pytest

from hvdlab.collectives.engine.requests import PendingCollective
from hvdlab.collectives.text import call_site
from hvdlab.kernel_ext.rank.status import memory
from hvdlab.kernel_ext.wire.cells import CellDone
from hvdlab.kernel_ext.wire.status import (
    AskStack,
    AskStatus,
    Complete,
    Completions,
    Inspect,
    Inspection,
    Stack,
    Status,
)
from support.patience import PATIENCE
from support.ranks.alone import run_in_new_rank

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank


def test_status_of_an_idle_rank(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        status = pool.ask(AskStatus(3), Status)
        assert (status.ticket, status.state, status.cell) == (3, "idle", "")
        assert 0 < status.pss <= status.rss
        assert status.cpu > 0
        assert status.threads >= threading.active_count() - 1
        assert (status.device, status.plane) == ("cpu", "shm, fake/thread")
        assert status.links == {"same GPU": (1,)}

    rank.play(script)


def test_status_comes_while_the_main_thread_is_stuck(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()
    rank.shell.user_ns["started"] = started = threading.Event()
    rank.engine.in_flight = [PendingCollective("loss", "allreduce", "cell [1] line 3", 1.5, False, 0)]

    def script(pool: Pool) -> None:
        cell = pool.start("started.set()\ngo.wait()")
        assert started.wait(PATIENCE)
        status = pool.ask(AskStatus(4), Status)
        assert (status.state, status.cell) == ("running", cell)
        (pending,) = status.pending
        assert (pending.collective, pending.name, pending.site) == ("allreduce", "loss", "cell [1] line 3")
        go.set()
        pool.finish(cell)

    rank.play(script)


STUCK = {
    "in python": (
        "def inner():\n    started.set()\n    go.wait()\ninner()",
        ["<module>", "inner", "wait", "wait"],
    ),
    "awaiting": (
        "import asyncio\nasync def inner():\n    started.set()\n"
        + "    while not go.is_set():\n        await asyncio.sleep(1e-3)\nawait inner()",
        ["<module>", "inner", "sleep"],
    ),
    "in a collective": ("def inner():\n    allreduce()\ninner()", ["<module>", "inner"]),
}


@pytest.mark.parametrize(("source", "functions"), STUCK.values(), ids=STUCK)
def test_the_stack_comes_while_the_main_thread_is_stuck(
    rank: Rank, source: str, functions: list[str]
) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()
    rank.shell.user_ns["started"] = started = threading.Event()
    namespace = {"__name__": "hvdlab.torch.mpi_ops", "go": go, "started": started}
    exec("def allreduce():\n    started.set()\n    go.wait()", namespace)  # noqa: S102
    rank.shell.user_ns["allreduce"] = namespace["allreduce"]

    def script(pool: Pool) -> None:
        cell = pool.start(source, label="[7]")
        assert started.wait(PATIENCE)
        while True:  # it has begun to wait, but may not have come to the innermost call
            stack = pool.ask(AskStack(5), Stack)
            if [f.function for f in stack.frames] == functions:
                break
        assert (stack.ticket, stack.cell) == (5, cell)
        assert [f.place for f in stack.frames[:2]] == ["cell [7]"] * 2
        assert stack.frames[0].text.endswith("inner()")
        go.set()
        pool.finish(cell)

    rank.play(script)


def test_an_idle_rank_has_no_stack(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        assert pool.ask(AskStack(1), Stack).frames == ()

    rank.play(script)


def test_memory_is_that_of_this_process() -> None:
    rss, pss = memory()
    assert 10 << 20 < pss <= rss


def test_completion_knows_the_ranks_variables(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.run("learning_rate = 0.1\nlearning_steps = 3")
        found = pool.ask(Complete(5, "x = learni", 10), Completions)
        assert found.ticket == 5
        assert {"learning_rate", "learning_steps"} <= set(found.matches)
        assert (found.start, found.end) == (4, 10)
        assert len(found.types) == len(found.matches)
        assert pool.ask(Complete(6, "no_such_thing_at_all.x", 22), Completions).matches == ()

    rank.play(script)


def test_completion_does_without_a_cache_that_another_process_is_writing(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two processes complete for the first time at once, or one was killed while it wrote the files of Jedi's cache."""
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path))
    code, names = "x = learni", {"learning_rate": 0.1}
    parso.cache.parser_cache.clear()
    assert [found.name for found in jedi.Interpreter(code, [names]).complete()] == ["learning_rate"]
    for file in tmp_path.rglob("*.pkl"):
        file.write_bytes(b"")
    parso.cache.parser_cache.clear()
    with pytest.raises(EOFError):
        jedi.Interpreter(code, [names]).complete()

    def script(pool: Pool) -> None:
        pool.run("learning_rate = 0.1")
        found = pool.ask(Complete(5, code, 10), Completions)
        assert (found.matches, found.start, found.end) == (("learning_rate",), 4, 10)

    rank.play(script)


def test_inspection_shows_documentation(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.run("def train():\n    'Trains one epoch.'")
        found = pool.ask(Inspect(6, "train()", 3), Inspection)
        assert found.found
        assert "Trains one epoch." in found.data["text/plain"]
        assert not pool.ask(Inspect(7, "nothing_here", 3), Inspection).found

    rank.play(script)


def test_a_property_that_raises_does_not_harm(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.run(
            "class Bad:\n    def __dir__(self): raise RuntimeError\n    def __getattr__(self, n): raise RuntimeError\nb = Bad()"
        )
        pool.ask(Complete(1, "b.x", 3), Completions)
        pool.ask(Inspect(1, "b", 1), Inspection)
        assert pool.run("1").done.value_repr == "1"

    rank.play(script)


def test_call_sites_read_as_the_notebook_does(rank: Rank) -> None:
    rank.shell.user_ns["call_site"] = call_site
    assert rank.run("\ncall_site(1)", label="[7]").done.value_repr == "'cell [7] line 3'"


def test_an_idle_rank_leaves_at_once(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.engine.leave()
        assert rank.left.wait(PATIENCE)

    rank.play(script)


def test_a_busy_rank_leaves_after_its_cell(rank: Rank) -> None:
    rank.shell.user_ns["started"] = started = threading.Event()

    def script(pool: Pool) -> None:
        pool.start("started.set()\nwhile True: pass")
        assert started.wait(PATIENCE)
        pool.engine.leave()
        done = pool.expect(CellDone)
        assert done.error is not None
        assert done.error.interrupted
        assert rank.left.wait(PATIENCE)

    rank.play(script)


def test_a_rank_gives_everything_back(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdlab.collectives import context
    from integration.kernel_ext.rank.conftest import Rank as MakeRank

    monkeypatch.setattr(context, "adopt", lambda engine: None)

    def state() -> list[Any]:
        return [
            sys.stdout,
            sys.stderr,
            sys.stdin,
            sys.breakpointhook,
            builtins.input,
            getpass.getpass,
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGURG),
            shell.displayhook,
            shell.display_pub,
            shell.compile,
            shell.display_trap.hook,
            {"_showtraceback", "ask_exit", "enable_gui", "run_code"} & set(vars(shell)),
            [os.stat(fd).st_ino for fd in (0, 1, 2)],
        ]

    before = state()
    rank = MakeRank(shell, capture_fds=True)
    assert all(a != b for a, b in zip(before[:4], state()[:4], strict=True))
    rank.close()
    assert state() == before


def test_sources_of_cells_can_be_looked_up(rank: Rank) -> None:
    rank.run("def f():\n    return 1", label="[7]")
    assert rank.run("import inspect\ninspect.getsource(f)").done.value_repr == repr(
        "def f():\n    return 1\n"
    )
    assert linecache.getline("<cell [7]>", 3) == "    return 1\n"


def test_warnings_name_the_cell() -> None:
    """In a process of its own: pytest collects warnings."""
    (ran,) = run_in_new_rank("import warnings\nwarnings.warn('careful')")
    assert "<cell [1]>:3: UserWarning: careful" in ran["stderr"]

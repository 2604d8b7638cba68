"""The notebook's debugger in ranks: a real kernel, asked as JupyterLab asks it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.jupyter.debugging_client import Debugging
from support.jupyter.live_kernel import LiveKernel
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share

pytest.importorskip("debugpy")
pytestmark = pytest.mark.timeout(180)

SETUP = (
    "%%hvd_run -np 2\nimport os, sys, numpy\nimport hvdlab.numpy as hvd\n"
    "from hvdlab.collectives import context\ncontext.init()\nrank = int(os.environ['RANK'])"
)

CELL = """\
%%hvd_run
def double(n):
    y = n * 2
    return y
z = double(rank + 1)
print(z)
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    kernel = LiveKernel(
        tmp_path_factory.mktemp("kernel"),
        prepare=["%load_ext hvdlab"],
    )
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(started: LiveKernel) -> LiveKernel:
    cell = started.run(SETUP)
    assert cell.error is None, cell.error
    return started


@pytest.fixture
def debugging(kernel: LiveKernel) -> Iterator[Debugging]:
    debugging = Debugging(kernel)
    debugging.switch_on()
    yield debugging
    debugging.switch_off()


def test_off_it_is_not_even_imported(kernel: LiveKernel) -> None:
    assert kernel.run("%%hvd_run\nprint('debugpy' in sys.modules, sys.gettrace())").lines() == [
        "[0,1] False None"
    ]


def test_a_breakpoint_stops_ranks_which_step_and_go_on(kernel: LiveKernel, debugging: Debugging) -> None:
    path = debugging.set_breakpoints(CELL, 4)
    cell = kernel.send(CELL)
    threads = debugging.stopped(2)
    assert set(debugging.ask("debugInfo")["body"]["stoppedThreads"]) == set(threads)

    frames = debugging.frames(threads[0])
    assert {(one["name"], one["line"], one["source"]["path"]) for one in frames} == {
        (f"rank {rank}: {name}", line, path)
        for rank in (0, 1)
        for name, line in (("double", 4), ("<module>", 5))
    }
    inner = {one["name"]: one["id"] for one in frames}
    assert debugging.variables(inner["rank 0: double"]) == {"n": "1", "y": "2"}
    assert debugging.variables(inner["rank 1: double"]) == {"n": "2", "y": "4"}
    told = debugging.ask("evaluate", expression="y * 100", frameId=inner["rank 1: double"])
    assert told["body"]["result"] == "400"
    rich = debugging.ask("richInspectVariables", variableName="y", frameId=inner["rank 1: double"])
    assert rich["body"]["data"] == {"text/plain": "4"}

    debugging.ask("next", threadId=threads[0])
    threads = debugging.stopped(2)  # both were at one line, so both have stepped
    # As debugpy itself: from Python 3.12 on a step that leaves a function stops in the line that has called it.
    assert {one["line"] for one in debugging.frames(threads[0])} == {6 if sys.version_info < (3, 12) else 5}
    assert debugging.ask("continue", threadId=1)["body"]["allThreadsContinued"]
    kernel.finish(cell)
    assert cell.error is None
    assert cell.lines() == ["[0] 2", "[1] 4"]


def test_one_rank_goes_on_and_nobody_takes_the_other_for_stuck(
    kernel: LiveKernel, debugging: Debugging
) -> None:
    code = "%%hvd_run\nx = rank + 1\nprint(hvd.allreduce(numpy.array([float(x)]), name='x').item())"
    debugging.set_breakpoints(code, 3)
    cell = kernel.send(code)
    threads = debugging.stopped(2)
    answer = debugging.ask("continue", threadId=threads[0], singleThread=True)
    assert not answer["body"]["allThreadsContinued"]
    debugging.wait(lambda one: one["event"] == "continued" and one["body"]["threadId"] == threads[0])
    assert [one["name"] for one in debugging.frames()] == ["rank 1: <module>"]
    debugging.ask("evaluate", expression="__import__('time').sleep(1.5)", frameId=debugging.frames()[0]["id"])
    assert not cell.ended
    debugging.ask("continue", threadId=1)
    kernel.finish(cell)
    assert cell.error is None, cell.error
    assert {line.split()[-1] for line in cell.lines()} == {"1.5"}


def test_a_function_of_a_cell_that_ran_before_has_breakpoints_too(kernel: LiveKernel) -> None:
    code = "%%hvd_run --ranks 0,1\n\ndef later(n):\n    n += 1\n    return n"
    kernel.run(code)
    debugging = Debugging(kernel)
    debugging.switch_on()
    try:
        path = debugging.set_breakpoints(code, 5)
        cell = kernel.send("%%hvd_rank 1\nprint(later(3))")
        (thread,) = debugging.stopped(1)
        assert (debugging.frames(thread)[0]["source"]["path"], debugging.frames(thread)[0]["line"]) == (
            path,
            5,
        )
        # Its caller is the cell that runs now.
        assert debugging.frames(thread)[1]["line"] == 2
        debugging.ask("continue", threadId=thread)
        kernel.finish(cell)
        assert cell.lines() == ["4"]
    finally:
        debugging.switch_off()


def test_an_interrupt_ends_a_cell_that_has_stopped(kernel: LiveKernel, debugging: Debugging) -> None:
    debugging.set_breakpoints(CELL, 4)
    for _ in range(2):
        cell = kernel.send(CELL)
        debugging.stopped(2)
        kernel.interrupt()
        kernel.finish(cell)
        assert cell.error is not None
        assert cell.error["evalue"] == "ranks 0,1 were interrupted"
        assert "pydevd" not in "".join(cell.error["traceback"])
        assert debugging.ask("debugInfo")["body"]["stoppedThreads"] == []


def test_values_whose_text_fails_or_takes_for_ever_hold_nobody_up(
    kernel: LiveKernel, debugging: Debugging
) -> None:
    code = (
        "%%hvd_run\nimport time\nclass Bad:\n    def __repr__(self): raise ValueError('no')\n"
        "class Slow:\n    def __repr__(self): time.sleep(1000)\ndef look():\n    bad, big = Bad(), 'x' * 10**7\n"
        "    print(1)\n    slow = Slow()\n    print(2)\nlook()"
    )
    debugging.set_breakpoints(code, 9, 11)
    cell = kernel.send(code)
    debugging.stopped(2)
    found = debugging.variables(debugging.frames()[0]["id"])
    assert "Bad" in found["bad"]
    assert len(found["big"]) < 70_000
    debugging.ask("continue", threadId=1)
    debugging.stopped(2)
    scope = debugging.ask("scopes", frameId=debugging.frames()[0]["id"])["body"]["scopes"][0]
    looking = debugging.begin("variables", variablesReference=scope["variablesReference"])
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    assert cell.error["evalue"] == "ranks 0,1 were interrupted"
    assert "variables" in debugging.answer(looking)["body"]


def test_a_step_that_leaves_the_cell_ends_it(kernel: LiveKernel, debugging: Debugging) -> None:
    code = "%%hvd_run\na = rank\na"
    debugging.set_breakpoints(code, 3)
    cell = kernel.send(code)
    (thread, _) = debugging.stopped(2)
    debugging.frames(thread)
    debugging.ask("stepOut", threadId=thread)
    kernel.finish(cell)
    assert cell.error is None


def test_switching_off_lets_ranks_go_on_and_leaves_no_trace(kernel: LiveKernel) -> None:
    debugging = Debugging(kernel)
    debugging.switch_on()
    debugging.set_breakpoints(CELL, 4)
    cell = kernel.send(CELL)
    debugging.stopped(2)
    debugging.switch_off()
    kernel.finish(cell)
    assert cell.lines() == ["[0] 2", "[1] 4"]
    again = kernel.run(CELL + "print(sys.gettrace(), sys.breakpointhook.__module__)")
    lines = [
        line.partition("] ")[2] for line in again.lines() if "None" in line
    ]  # of both at once, or of each
    assert lines
    assert all(line.startswith("None hvdlab.") for line in lines)


def test_a_rank_that_dies_while_stopped_and_the_one_in_its_place(
    kernel: LiveKernel, debugging: Debugging
) -> None:
    debugging.set_breakpoints(CELL, 4)
    cell = kernel.send(CELL)
    threads = debugging.stopped(2)
    inner = {one["name"]: one["id"] for one in debugging.frames(threads[0])}["rank 1: double"]
    pid = int(debugging.ask("evaluate", expression="os.getpid()", frameId=inner)["body"]["result"])
    os.kill(pid, signal.SIGKILL)
    debugging.wait(lambda one: one["event"] == "continued" and one["body"]["threadId"] == threads[1])
    assert not debugging.ask("scopes", frameId=inner)["success"]
    debugging.ask("continue", threadId=threads[0])
    kernel.finish(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "RankDied"

    kernel.run("%hvd_pool repair")
    assert kernel.run("%%hvd_rank 1\nrank = 1").error is None
    cell = kernel.send(CELL)
    assert len(debugging.stopped(2)) == 2
    debugging.ask("continue", threadId=1)
    kernel.finish(cell)
    assert cell.lines() == ["[0] 2", "[1] 4"]


def test_ranks_that_are_added_stop_as_well(kernel: LiveKernel, debugging: Debugging) -> None:
    code = "%%hvd_run -np 3\nprint(1)"
    debugging.set_breakpoints(code, 2)
    cell = kernel.send(code)
    debugging.stopped(3)
    debugging.ask("continue", threadId=1)
    kernel.finish(cell)
    assert cell.lines()[-1] == "[0-2] 1"


def test_cells_of_the_kernel_itself_are_debugged_as_ever(kernel: LiveKernel, debugging: Debugging) -> None:
    code = "a = 1\nb = a + 1\nprint(b)"
    debugging.set_breakpoints(code, 3)
    cell = kernel.send(code)
    event = debugging.wait(lambda one: one["event"] == "stopped")
    found = debugging.frames(event["body"]["threadId"])
    assert found[0]["line"] == 3
    assert not found[0]["name"].startswith("rank")
    debugging.ask("continue", threadId=event["body"]["threadId"])
    kernel.finish(cell)
    assert cell.lines() == ["2"]


def test_a_child_that_a_cell_forks_is_not_stopped(kernel: LiveKernel, debugging: Debugging) -> None:
    code = (
        "%%hvd_run\npid = os.fork()\nif pid == 0:\n    done = 7\n    os._exit(done)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    debugging.set_breakpoints(code, 4)
    lines = kernel.run(code).lines()  # equal ones are one if they come soon after one another
    assert lines in (["[0,1] 7"], ["[0] 7", "[1] 7"], ["[1] 7", "[0] 7"])


def test_nothing_listens_beyond_this_host(kernel: LiveKernel, debugging: Debugging) -> None:
    debugging.set_breakpoints(CELL, 4)
    cell = kernel.send(CELL)
    debugging.stopped(2)
    kernel_process = psutil.Process(kernel.manager.provisioner.process.pid)  # type: ignore[union-attr]
    everybody = [kernel_process, *kernel_process.children(recursive=True)]
    listening = [
        (process.pid, one.laddr)
        for process in everybody
        for one in _connections(process)
        if one.status == "LISTEN"
    ]
    assert listening
    assert {address.ip for _, address in listening} <= {"127.0.0.1", "::1"}
    ranks = {int(line.split()[-1]) for line in _pids(kernel, debugging, cell)}
    assert not [one for one in listening if one[0] in ranks]  # their debug servers listen nowhere at all


def _connections(process: psutil.Process) -> list[psutil._ntuples.pconn]:
    try:
        return list(process.net_connections("inet"))
    except psutil.Error:
        return []


def _pids(kernel: LiveKernel, debugging: Debugging, cell: object) -> list[str]:
    debugging.ask("continue", threadId=1)
    kernel.finish(cell)  # type: ignore[arg-type]
    return kernel.run("%%hvd_run\nprint(os.getpid())").lines()


def left_out(kernel: LiveKernel, debugging: Debugging) -> None:
    """Give a rank another debugpy than the known one: that is reported, and the others are debugged."""
    assert kernel.run("%hvd_pool resize 3").error is None
    broken = kernel.run(
        "%%hvd_rank 2\nimport debugpy.server.api\nfrom _pydevd_bundle.pydevd_api import PyDevdAPI\n"
        "del PyDevdAPI.set_source_mapping"
    )
    assert broken.error is None, broken.error
    code = "%%hvd_run\nx = 2\nprint(x)"
    debugging.switch_on()
    told = debugging.wait(lambda one: one["event"] == "output" and "rank 2" in one["body"]["output"])
    assert "rank 2 does not stop at breakpoints: debugpy can't be started: AttributeError" in str(told)
    debugging.set_breakpoints(code, 3)
    cell = kernel.send(code)
    debugging.stopped(2)
    debugging.ask("continue", threadId=1)
    kernel.finish(cell)
    assert cell.error is None
    assert all(line.endswith("] 2") for line in cell.lines())
    (line,) = cell.lines("stderr")
    assert f"{line}\n" == told["body"]["output"]
    again = kernel.run("%%hvd_run\nx")
    assert (again.error, again.lines("stderr")) == (None, [])
    debugging.switch_off()


def test_switched_on_before_there_are_ranks_and_before_the_extension_is_loaded(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path)
    try:
        debugging = Debugging(kernel)
        debugging.switch_on()
        code = "%%hvd_run -np 2\nx = 1\nprint(x)"
        debugging.set_breakpoints(code, 3)
        kernel.run("%load_ext hvdlab")
        cell = kernel.send(code)
        debugging.stopped(2)
        debugging.ask("continue", threadId=1)
        kernel.finish(cell)
        assert cell.error is None
        assert cell.lines()[-1] == "[0,1] 1"  # after the lines about the start
        debugging.switch_off()
        left_out(kernel, debugging)
    finally:
        kernel.close()

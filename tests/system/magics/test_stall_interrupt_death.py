"""Reports of ranks that wait, do not answer an interrupt, or die; in a real kernel with real ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from support.jupyter.live_kernel import Cell, LiveKernel
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share

SETUP = (
    "%%hvd_run -np 3\nimport os, time\nimport numpy as np\n"
    "import hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\ncontext.init()\nrank = context.engine('').rank\nx = rank * 10"
)
SUM = "%%hvd_run\nprint(hvd.allreduce(np.ones(1), name='again')[0], x)"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    before = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS")
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.5"
    kernel = LiveKernel(tmp_path_factory.mktemp("kernel"), prepare=["%load_ext hvdlab"])
    if before is None:
        del os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(started: LiveKernel) -> LiveKernel:
    cell = started.run(SETUP)
    assert cell.error is None, cell.error
    started.answer_within()
    return started


def told(cell: Cell) -> list[str]:
    """Return the lines shown below the cell while it waited, one after the other."""
    shown = [*cell.of("display_data"), *cell.of("update_display_data")]
    areas = {content["transient"]["display_id"] for content in shown}
    assert len(areas) <= 1, areas
    return [content["data"]["text/plain"] for content in shown]


def plain(lines: list[str]) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines))


def test_it_is_told_who_is_awaited_and_where_that_is(kernel: LiveKernel) -> None:
    kernel.run("%%hvd_run\nimport threading\nready = threading.Event()")
    cell = kernel.send(
        "%%hvd_run --background\ndef step():\n    if rank == 1:\n        while not os.path.exists('go'): time.sleep(0.01)\n"
        "    hvd.allreduce(np.ones(1), name='loss')\nstep()"
    )
    number = cell_number(kernel, cell)
    awaited = rf"allreduce `loss` \(cell \[{number}\] line 5\): ranks 0,2 have waited \d+ s for rank 1\n"
    # Before that it may be told, too, that one of them waits for the other.
    kernel.until(lambda: any(re.match(awaited, each) for each in told(cell)))
    place = next(each for each in told(cell) if re.match(awaited, each)).split("\n")[1]
    assert place.startswith(f"  rank 1: cell [{number}] line 4 in step: while not os.path.exists('go')")
    where = kernel.run("%hvd_where").of("execute_result")[0]["data"]["text/plain"]
    assert re.search(rf"ranks 0,2: in allreduce `loss` for \d+ s\n  cell \[{number}\] line 6\n", where), where
    assert f"rank 1: running\n  cell [{number}] line 6\n    step()\n  cell [{number}] line 4 in step" in where
    kernel.run("open('go', 'w').close()")
    kernel.until(lambda: "went on after about" in told(cell)[-1])
    assert "ranks 0,2 waited for rank 1" in told(cell)[-1]
    assert "stderr" not in [content["name"] for content in cell.of("stream")]


def cell_number(kernel: LiveKernel, cell: Cell) -> int:
    kernel.finish(cell)
    return int(cell.reply["execution_count"])


def test_a_stopped_rank_is_named_given_up_and_replaced(kernel: LiveKernel) -> None:
    pid = int(kernel.run("%%hvd_rank 1\nprint(os.getpid())").text())
    cell = kernel.send(
        "%%hvd_run\nprint('begin')\ntry: hvd.allreduce(np.ones(1), name='loss') if rank != 1 else time.sleep(60)\n"
        "finally: print('left')"
    )
    kernel.until(lambda: "[0-2] begin" in cell.lines())
    os.kill(pid, signal.SIGSTOP)
    kernel.interrupt()
    kernel.until(lambda: "interrupt again" in cell.text("stderr"))
    said, *places = cell.lines("stderr")
    # On a slow machine other ranks may be late, too.
    assert re.fullmatch(
        "(rank 1 has|ranks .* have) not answered the interrupt; interrupt again to stop waiting", said
    )
    assert f"  rank 1: stopped (SIGSTOP); `kill -CONT {pid}` lets it go on" in places
    kernel.until(lambda: {"[0,2] left"} <= {*cell.lines()} or {"[0] left", "[2] left"} <= {*cell.lines()})
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    report = plain(cell.error["traceback"])
    assert "ranks 0,2 were interrupted" in report
    assert (
        "rank 1: no answer to the interrupt, not waited for any longer; `%hvd_pool restart 1` replaces it"
        in report
    )
    kernel.answer_within(1.0)  # this rank will not
    pulling = kernel.send("%hvd_pull x")
    kernel.until(lambda: re.search("waits for rank.*:\n(.*\n)*  rank 1: stopped", pulling.text("stderr")))
    kernel.interrupt()
    kernel.finish(pulling)
    assert pulling.error is not None
    assert plain(pulling.error["traceback"]) == "KeyboardInterrupt: %hvd_pull x was given up"
    refused = kernel.run(SUM).text("stderr")
    assert "rank 1 still hangs in cell [" in refused
    assert kernel.run("%%hvd_run --ranks 0,2\nprint(x)").lines() == ["[0] 0", "[2] 20"]
    kernel.answer_within()
    (said,) = kernel.run("%hvd_pool restart 1").lines()
    assert said.startswith("rank 1 started again, with empty memory; it lacks rank, x")
    kernel.run(SETUP.replace("%%hvd_run -np 3", "%%hvd_rank 1"))
    assert kernel.run(SUM).lines() == ["[0] 1.0 0", "[1] 1.0 10", "[2] 1.0 20"]


def test_c_code_that_keeps_the_interpreter_is_told_and_waited_for(kernel: LiveKernel) -> None:
    # Longer than it takes to tell it, as long as the test does not end it.
    keeps = b"touch held; timeout 60 sh -c 'while [ ! -e release ]; do sleep 0.02; done'"
    cell = kernel.send(
        f"%%hvd_run\nimport ctypes\nif rank == 2: ctypes.PyDLL(None).system({keeps!r})\n"
        "else:\n    while not os.path.exists('held'): time.sleep(0.01)\n    print('held')\n    time.sleep(60)\n"
    )
    kernel.until(lambda: "[0,1] held" in cell.lines())
    kernel.interrupt()
    # On a slow machine the other ranks may be late, too.
    kernel.until(lambda: "not answered the interrupt" in cell.text("stderr"))
    (kernel.directory / "release").touch()
    kernel.finish(cell)
    number = cell.reply["execution_count"]
    assert f"rank 2: cell [{number}] line 3; no answer, probably C code keeps the interpreter" in cell.text(
        "stderr"
    )
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert kernel.run(SUM).lines() == ["[0] 1.0 0", "[1] 1.0 10", "[2] 1.0 20"]


@pytest.mark.parametrize(
    ("code", "said", "lines"),
    [
        ("print('bye', file=sys.stderr); os._exit(3)", "exit code 3", []),
        ("def f(): ctypes.CDLL(None).abort()\n    f()", "abort() was called", ["line 7, in f", "line 8"]),
    ],
    ids=["os._exit", "abort"],
)
def test_what_is_known_of_a_death_is_told(kernel: LiveKernel, code: str, said: str, lines: list[str]) -> None:
    cell = kernel.run(
        "%%hvd_run\nimport ctypes, sys\nif rank != 1:\n"
        "    loss = hvd.allreduce_async(np.ones(1), name='loss'); open(f'sent{rank}', 'w').close()\n"
        "else:\n    while not all(os.path.exists(f'sent{other}') for other in (0, 2)): time.sleep(0.01)\n"
        f"    {code}\nhvd.synchronize(loss)"
    )
    for other in (0, 2):
        (kernel.directory / f"sent{other}").unlink()
    assert cell.error is not None
    assert cell.error["evalue"] == f"rank 1 died: {said}"
    report = plain(cell.error["traceback"]).splitlines()
    assert re.fullmatch(r"  peak memory \d+ MiB", report[1])
    number = cell.reply["execution_count"]
    assert report[2 : 2 + len(lines)] == [f"  Cell In[{number}], {line}" for line in lines]
    assert "ranks 0,2: stopped in allreduce `loss` because rank 1 died" in report
    # After a while it is also shown while the others go on, on a slow machine before they have ended.
    assert [line for line in cell.lines("stderr") if "died" not in line] == (
        ["[1] bye"] if "bye" in code else []
    )
    assert kernel.run("%%hvd_run\nprint(hvd.allreduce(np.ones(1), name='again')[0], x)").lines()[-2:] == [
        "[0] 1.0 0",
        "[2] 1.0 20",
    ]
    (repaired,) = kernel.run("%hvd_pool repair").lines()
    assert repaired.startswith("rank 1 is back (")
    assert " it lacks rank, x" in repaired

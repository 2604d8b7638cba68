"""Nothing outlives the process that owns the pool, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdlab.collectives.client import Client
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.assembly import processes_for
from hvdlab.kernel_ext.notebook.prestart import Prestart
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.local import LocalStarter
from support.fixtures.kernel_ext_pool import StartPool
from support.interrupting import press_ctrl_c
from support.patience import GONE, PATIENCE
from support.ranks.fork_server import living

OWNER = Path(__file__).with_name("owner.py")


@contextlib.contextmanager
def owner(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    process = subprocess.Popen(
        [sys.executable, str(OWNER), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "up\n":
            pytest.fail(process.stderr.read())
        yield process, psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "words", [(), ("cluster",), ("cluster", "busy"), ("launcher=mpi", "busy")], ids="-".join
)
def test_everything_ends_when_the_owner_is_killed(words: tuple[str, ...]) -> None:
    with owner("2", *words) as (process, family):
        assert len(family) >= 4  # fork server, coordinator, two ranks
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=GONE)
        assert alive == []


def test_everything_ends_when_the_owner_is_killed_while_it_starts() -> None:
    source = (
        "from hvdlab.kernel_ext.notebook.prestart import Prestart; from hvdlab.collectives.time_limits import Deadline; "
        "base = Prestart.begin().take(Deadline(60)); print('on', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HVDLAB_PRELOAD": "torch"},  # long enough to be killed meanwhile
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []


def test_everything_ends_when_the_owner_exits_without_stopping_the_pool() -> None:
    with owner("2", "exit") as (process, family):
        assert process.wait(GONE) == 0
        _, alive = psutil.wait_procs(family, timeout=GONE)
        assert alive == []


def test_an_owner_that_exits_while_it_starts_says_nothing() -> None:
    """Its thread is in the middle of imports then, which fail once the interpreter ends."""
    source = (
        "from hvdlab.kernel_ext.notebook.prestart import Prestart; prestart = Prestart.begin(preload=False); "
        "prestart._done.wait()"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_while_the_pool_starts_leaves_nothing() -> None:
    source = (
        "from hvdlab.kernel_ext.notebook.pool import Pool\n"
        "Pool.start(2, on_progress=lambda text: print(text, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HVDLAB_PRELOAD": "torch"},
    )
    assert process.stdout is not None
    while process.stdout.readline() != "importing what the ranks share\n":
        assert process.poll() is None
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert said.rstrip().endswith("KeyboardInterrupt")
    _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []


def interrupt_first(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Have the user press Ctrl-C when this method is called first."""
    original, presses = getattr(owner, name), [press_ctrl_c]

    def call(*args: Any, **kwargs: Any) -> Any:
        if presses:
            presses.pop()()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name"), [(LocalStarter, "close"), (ForkServer, "close"), (Client, "close")]
)
def test_interrupted_stop_ends_all_processes(
    owner: Any, name: str, start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(psutil.Process().children(recursive=True))
    pool = start_pool(1)
    family = [child for child in psutil.Process().children(recursive=True) if child not in others]
    with monkeypatch.context() as patch:
        interrupt_first(patch, owner, name)
        with pytest.raises(KeyboardInterrupt):
            pool.stop()
        _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []


class InterruptedDeadline(Deadline):
    """Time limit for a wait that the user interrupts."""

    def remaining(self) -> float | None:
        press_ctrl_c()
        return super().remaining()


def test_interrupted_start_of_processes_leaves_none() -> None:
    others = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        processes_for(False, None, False, None, InterruptedDeadline(PATIENCE))
    family = [child for child in psutil.Process().children(recursive=True) if child not in others]
    _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []


def test_interrupted_close_of_started_processes_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(psutil.Process().children(recursive=True))
    prestart = Prestart.begin(preload=False)
    prestart._done.wait(PATIENCE)
    family = [child for child in psutil.Process().children(recursive=True) if child not in others]
    with monkeypatch.context() as patch:
        interrupt_first(patch, ForkServer, "close")
        with pytest.raises(KeyboardInterrupt):
            prestart.close()
        _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []


def test_ctrl_c_in_the_owner_s_terminal_does_not_reach_the_ranks() -> None:
    with owner("2") as (process, family):
        groups = {psutil.Process(process.pid).pid} | {p.pid for p in family}
        assert len(groups) == len(family) + 1
        process.send_signal(signal.SIGINT)  # its wait is broken, and it ends in order
        process.wait(GONE)
        _, alive = psutil.wait_procs(family, timeout=GONE)
        assert alive == []


def fork_server(family: list[psutil.Process]) -> psutil.Process:
    return next(process for process in family if process.name() == "hvd-forkserver")


@pytest.mark.parametrize("how", ["owner", "owner and fork server", "owner while the fork server is stopped"])
def test_ranks_that_are_hard_to_end_do_not_outlive_the_owner(how: str) -> None:
    """One holds the interpreter's lock, one is stopped, one has children, one ignores SIGTERM; the owner has a fork."""
    with owner("4", "hard") as (process, family):
        fork = next(child for child in family if str(OWNER) in child.cmdline())
        warm = fork_server(family)
        family.remove(fork)
        assert len(family) >= 8  # coordinator, fork server, four ranks, two children of a rank's
        if how == "owner and fork server":
            warm.kill()
        if how == "owner while the fork server is stopped":
            warm.suspend()
        process.kill()
        process.wait()
        alive = living({member.pid for member in family})
        fork.kill()  # it has its owner's output open, for whose end the test would wait
        assert alive == []


def test_ranks_of_mpi_that_are_stuck_in_c_code_do_not_outlive_the_owner() -> None:
    with owner("2", "launcher=mpi", "stuck") as (process, family):
        assert len(family) >= 5  # fork server, coordinator, mpiexec, its proxy, two ranks
        process.kill()
        process.wait()
        assert living({member.pid for member in family}) == []


def test_a_pool_starts_where_all_standard_streams_are_closed(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "from hvdlab.kernel_ext.notebook.pool import Pool\n"
        "pool = Pool.start(2)\n"
        "found = pool.run('1 + 1')\n"
        "pool.stop()\n"
        "open(sys.argv[1], 'w').write(repr([found[rank] for rank in found.ranks]))\n"
    )
    answer = tmp_path / "answer"
    command = [sys.executable, "-c", source, str(answer)]
    subprocess.run(["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], timeout=PATIENCE, check=False)
    assert answer.read_text() == "[2, 2]"


def test_ranks_leave_no_directories_where_there_is_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "t").mkdir()
    source = (
        "from hvdlab.kernel_ext.notebook.pool import Pool\n"
        "pool = Pool.start(2)\n"
        "found = pool.run('get_ipython().ipython_dir')\n"
        "print(found[0] == found[1])\n"
        "pool.stop()\n"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name != "IPYTHONDIR"},
        "HOME": "/dev/null/home",
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "TMPDIR": str(tmp_path / "t"),
    }
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
    assert list((tmp_path / "t").iterdir()) == []

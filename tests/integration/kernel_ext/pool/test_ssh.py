"""A pool whose ranks the agent of a host starts: here on this host, which needs no shell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import GONE

StartPool = Callable[..., Pool]

PLACE = "import os; tuple(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))"


def test_lost_ranks_are_replaced_and_the_pool_is_resized(start_pool: StartPool) -> None:
    pool = start_pool(2, launcher="ssh", hosts="localhost:3")
    pids = list(pool.run("kept = 41; import os; os.getpid()"))
    run = pool.start_run("import time; time.sleep(60)", ranks=[1])
    os.kill(pids[1], signal.SIGSEGV)
    death = run.wait(GONE).deaths[1]
    assert death.reason == "segmentation fault"
    assert "Fatal Python error" in death.tail
    assert pool.lost == {1: "segmentation fault"}
    assert pool.repair() == (1,)
    pool.resize(3)
    assert list(pool.run(PLACE)) == [("0", "3", "0", "3"), ("1", "3", "1", "3"), ("2", "3", "2", "3")]
    assert list(pool.run("kept + 1", ranks=[0])) == [42]
    with pytest.raises(InvalidRequestError, match="needs 4 slots, but the hosts have 3: localhost:3"):
        pool.resize(4)
    pool.resize(1)
    assert list(pool.run(PLACE)) == [("0", "1", "0", "1")]


def test_ranks_are_forked_by_a_server_of_their_host_that_may_die(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_PRELOAD", "colorsys")
    pool = start_pool(2, launcher="ssh", hosts="localhost:2")
    found = list(
        pool.run("import os, sys; kept = 41; ('colorsys' in sys.modules, os.getpid(), os.getppid())")
    )
    (loaded, first, server), (other_loaded, second, other_server) = found
    assert loaded
    assert other_loaded
    assert server == other_server
    forks = psutil.Process(server)
    assert forks.name() == "hvd-forkserver"
    forks.kill()
    psutil.wait_procs([forks], timeout=GONE)
    assert list(pool.run("kept + 1")) == [42, 42]
    run = pool.start_run("import time; print('said', end=''); time.sleep(60)", ranks=[1])
    os.kill(second, signal.SIGKILL)
    assert set(run.wait(GONE).deaths) == {1}
    assert pool.repair() == (1,)
    parents = list(pool.run("os.getppid()", ranks=[0])) + list(pool.run("import os; os.getppid()", ranks=[1]))
    assert parents[1] != server
    assert list(pool.run("globals().get('kept')")) == [41, None]
    assert list(pool.run("os.getpid()", ranks=[0])) == [first]


def test_a_module_that_crashes_the_import_on_a_host_is_told(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "crashing.py").write_text("import os, sys\nprint('about to go', file=sys.stderr)\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "crashing")
    with pytest.raises(
        StartError, match=r"(?s)fork server of its host ended: abort\(\) was called.*about to go"
    ):
        start_pool(2, launcher="ssh", hosts="localhost:2")


def test_what_can_not_be_had_is_refused_with_the_reason() -> None:
    with pytest.raises(
        InvalidRequestError, match="can't be kept when their notebook ends, because they end with the"
    ):
        Pool.start(2, launcher="ssh", hosts="localhost:2", keep="mine")
    with pytest.raises(InvalidRequestError, match="needs hosts; name them as hosts='a:4,b:4'"):
        Pool.start(2, launcher="ssh")
    with pytest.raises(
        InvalidRequestError, match="`ssh` has no option `user`; it takes `python`, `shell`, `host_names`"
    ):
        Pool.start(2, launcher="ssh", hosts="localhost:2", launcher_options={"user": "me"})
    with pytest.raises(InvalidRequestError, match="`local` has no option `python`; it takes none"):
        Pool.start(2, launcher_options={"python": "python3"})


def test_an_interpreter_that_can_not_be_run_is_named() -> None:
    with pytest.raises(StartError, match="agent of localhost could not be started: `/no/such/python`"):
        Pool.start(2, launcher="ssh", hosts="localhost:2", launcher_options={"python": "/no/such/python"})

"""A pool whose coordinator or fork server is killed goes on with the ranks that live."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.messages import Death
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.time_limits import RestartLimit
from hvdlab.collectives.types import Membership
from hvdlab.kernel_ext.notebook import coordinator_recovery
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.coordinator_recovery import CoordinatorRecovery
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.prestart import Prestart
from hvdlab.kernel_ext.notebook.rank_lifecycle import CUT_OFF_WITHIN
from support.patience import GONE, HOUR, PATIENCE, eventually
from support.pool_probe import PoolProbe
from support.pool_recorder import Recorder

StartPool = Callable[..., Pool]

SET_UP = """
import os, time
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
me = int(os.environ["RANK"])
memory = np.random.default_rng(me).integers(0, 1 << 30, 1 << 16)
secret = hash(memory.tobytes())
"""
INTACT = "(os.getpid(), hash(memory.tobytes()) == secret, hvd.allreduce(np.ones(3) * (me + 1), op=hvd.Sum).tolist())"


class Watched:
    """Pool whose ranks' memory is known."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        assert pool.run(SET_UP).errors == {}
        self.pids = pool.pull("os.getpid()")
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        notice = PoolProbe(pool).runs.notice

        def recorded(text: str) -> None:
            self._told.put(text)
            notice(text)

        PoolProbe(pool).runs.notice = recorded  # type: ignore[method-assign]

    def told(self) -> str:
        """Return the next line for the user. It comes from a thread that may say it after the cell, or while another
        one runs."""
        return self._told.get(timeout=30)

    @property
    def coordinator(self) -> int:
        """Its process id."""
        return PoolProbe(self.pool).coordinator.pid

    @property
    def warm(self) -> int:
        """The process id of the fork server."""
        return PoolProbe(self.pool).fork_server.pid

    def kill_server(self) -> None:
        os.kill(self.warm, signal.SIGKILL)

    def kill_coordinator(self) -> None:
        os.kill(self.coordinator, signal.SIGKILL)

    def check(self) -> None:
        """Check that all ranks are the same processes, and their next collective is right."""
        results = self.pool.run(INTACT, timeout=60)
        assert results.errors == {}
        total = [sum(range(1, len(self.pids) + 1))] * 3
        assert {rank: results[rank] for rank in results.ranks} == {
            rank: (pid, True, total) for rank, pid in self.pids.items()
        }


@pytest.mark.soak
def test_the_coordinator_dies_while_nothing_happens(start_pool: StartPool) -> None:
    watched = Watched(start_pool(3))
    before = watched.coordinator
    gone = threading.Event()
    watched.pool.client.on_reconnected(lambda world: gone.set())
    watched.kill_coordinator()
    assert gone.wait(30)
    watched.check()
    assert watched.coordinator != before
    PoolProbe(watched.pool).recovery.await_recovered(30)
    said = [*watched.pool.news()]
    assert len(said) <= 1  # the cell can show it
    assert watched.pool.news() == []


def test_it_is_told_before_the_next_cell(start_pool: StartPool) -> None:
    watched = Watched(start_pool(1))
    wait_for_news = threading.Event()
    watched.pool.client.on_reconnected(lambda world: wait_for_news.set())
    watched.kill_coordinator()
    assert wait_for_news.wait(30)
    PoolProbe(watched.pool).recovery.await_recovered(30)
    (said,) = watched.pool.news()
    assert said.startswith("the coordinator ended (killed by SIGKILL) and was replaced within ")
    assert said.endswith("; the ranks and their variables are intact")
    watched.check()


def test_a_cell_is_sent_while_there_is_no_coordinator(start_pool: StartPool) -> None:
    watched = Watched(start_pool(2))
    for _ in range(3):
        watched.kill_coordinator()
        watched.check()


def test_coordinators_that_die_often_are_replaced_after_a_pause(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that were given up would take its ranks' memory along."""
    watched = Watched(start_pool(2))
    deaths = RestartLimit(
        coordinator_recovery.OFTEN + 8, window=HOUR
    )  # a slow machine needs more than a minute for all of them
    monkeypatch.setattr(PoolProbe(watched.pool).recovery, "_deaths", deaths)
    for _ in range(coordinator_recovery.OFTEN):
        watched.kill_coordinator()
        watched.check()
    out = Recorder()
    watched.kill_coordinator()
    assert watched.pool.run("me", out=out, timeout=60).errors == {}
    watched.check()
    assert any("; the next one is started in 1 s" in said for said in [*out.notes, *watched.pool.news()])


def test_pauses_grow_but_not_beyond_what_ranks_wait() -> None:
    pauses = [coordinator_recovery.pause(deaths) for deaths in range(20)]
    assert pauses[: coordinator_recovery.OFTEN + 3] == [0.0] * coordinator_recovery.OFTEN + [1.0, 2.0, 4.0]
    assert max(pauses) == coordinator_recovery.LONGEST_PAUSE < Settings().reattach


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_the_coordinator_dies_while_cells_print(start_pool: StartPool, kills: int) -> None:
    watched = Watched(start_pool(2))
    out = Recorder()
    run = watched.pool.start_run("for i in range(60_000):\n    print('line', i, me)\nme + 40", out=out)
    for _ in range(kills):
        out.started.clear()
        assert out.started.wait(30)
        gone = threading.Event()
        watched.pool.client.on_reconnected(lambda world, gone=gone: gone.set())  # type: ignore[misc]
        watched.kill_coordinator()
        assert gone.wait(30)
        if run.done:
            break
    results = run.wait(60)
    assert results.errors == {}
    assert list(results) == [40, 41]
    for rank in (0, 1):
        assert out.text[rank] == "".join(f"line {i} {rank}\n" for i in range(60_000))
    assert "replaced within" in watched.told()
    watched.check()


def test_only_the_connection_to_the_coordinator_is_lost(start_pool: StartPool) -> None:
    watched = Watched(start_pool(2))
    before = watched.coordinator
    out = Recorder()
    run = watched.pool.start_run("for i in range(30_000):\n    print('line', i, me)\nme + 40", out=out)
    assert out.started.wait(30)
    again = threading.Event()
    watched.pool.client.on_reconnected(lambda world: again.set())
    watched.pool.client._connection._endpoint._sock.shutdown(socket.SHUT_RDWR)
    assert again.wait(30)
    results = run.wait(60)
    assert (results.errors, list(results)) == ({}, [40, 41])
    for rank in (0, 1):
        assert out.text[rank] == "".join(f"line {i} {rank}\n" for i in range(30_000))
    PoolProbe(watched.pool).recovery.await_recovered(30)
    (said,) = [*out.notes, *watched.pool.news()]
    assert said.startswith("the connection to the coordinator was lost (")
    assert (watched.coordinator, watched.pool.client.incarnation) == (before, 0)
    watched.check()


def test_the_coordinator_dies_in_a_collective(start_pool: StartPool) -> None:
    watched = Watched(start_pool(3))
    out = Recorder()
    run = watched.pool.start_run(
        "if me:\n    loss = hvd.allreduce_async(np.ones(4), name='loss')\n    print('waiting', flush=True)\n"
        "    hvd.synchronize(loss)\nelse:\n    time.sleep(60)",
        out=out,
    )
    out.wait_for("waiting", ranks=(1, 2))
    watched.pool.client.flush()
    watched.kill_coordinator()
    results = run.wait(60)
    assert {rank: error.ename for rank, error in results.errors.items()} == {
        0: "KeyboardInterrupt",
        1: "AbortedError",
        2: "AbortedError",
    }
    assert results.errors[1].cause == "coordinator_lost"
    watched.check()


def test_a_cell_that_catches_the_failure_goes_on(start_pool: StartPool, tmp_path: Path) -> None:
    watched = Watched(start_pool(2))
    out = Recorder()
    rebuilt = tmp_path / "rebuilt"
    run = watched.pool.start_run(
        # Where no rank had anything in flight just then, none sees a failure.
        "failures = over = 0\nprint('begun', flush=True)\n"
        "while not over:\n"
        f"    try:\n        over = hvd.allreduce(np.array([os.path.exists({str(rebuilt)!r})]), op=hvd.Max, name='step')[0]\n"
        "    except RuntimeError as error:\n        failures += 1\n"
        "hvd.allreduce(np.ones(1) * me, op=hvd.Sum).tolist()",
        out=out,
    )
    out.wait_for("begun", ranks=(0, 1))
    watched.kill_coordinator()
    watched.told()
    rebuilt.touch()
    results = run.wait(60)
    assert results.errors == {}
    assert list(results) == [[1.0], [1.0]]
    watched.check()


def test_variables_are_pulled_although_the_coordinator_dies(start_pool: StartPool, tmp_path: Path) -> None:
    watched = Watched(start_pool(2))
    out = Recorder()
    dead = tmp_path / "dead"
    run = watched.pool.start_run(
        f"print('on', flush=True)\nwhile not os.path.exists({str(dead)!r}): time.sleep(0.01)", out=out
    )
    out.wait_for("on", ranks=(0, 1))
    found: list[object] = []
    pulling = threading.Thread(target=lambda: found.append(watched.pool.pull("me * 7")))
    pulling.start()
    eventually(lambda: PoolProbe(watched.pool).has_open_questions)
    watched.kill_coordinator()
    dead.touch()
    pulling.join(PATIENCE)
    assert found == [{0: 0, 1: 7}]
    assert run.wait(30).errors == {}


def test_an_interrupt_is_not_lost_with_the_coordinator(start_pool: StartPool) -> None:
    watched = Watched(start_pool(2))
    out = Recorder()
    run: CellHandle = watched.pool.start_run("print('on', flush=True)\nwhile True: pass", out=out)
    out.wait_for("on", ranks=(0, 1))
    watched.kill_coordinator()
    run.interrupt()
    results = run.wait(60)
    assert {error.ename for error in results.errors.values()} == {"KeyboardInterrupt"}
    watched.check()


def test_a_rank_dies_with_the_coordinator(start_pool: StartPool) -> None:
    watched = Watched(start_pool(3))
    watched.kill_coordinator()
    os.kill(watched.pids[1], signal.SIGKILL)
    while 1 not in watched.pool.lost:
        PoolProbe(watched.pool).recovery.await_recovered(30)
    assert watched.pool.repair() == (1,)
    assert watched.pool.ranks == (0, 1, 2)
    assert watched.pool.run(SET_UP, ranks=[1]).errors == {}
    watched.pids[1] = watched.pool.pull("os.getpid()", [1])[1]
    watched.check()


@pytest.mark.soak
def test_the_pool_is_resized_while_there_is_no_coordinator(start_pool: StartPool) -> None:
    watched = Watched(start_pool(2))
    watched.kill_coordinator()
    watched.pool.resize(3)
    assert watched.pool.ranks == (0, 1, 2)
    assert watched.pool.pull("os.environ['WORLD_SIZE']", [0, 1]) == {0: "3", 1: "3"}
    assert watched.pool.run(SET_UP, ranks=[2]).errors == {}
    watched.pids |= watched.pool.pull("os.getpid()", [2])
    watched.check()
    watched.kill_coordinator()
    watched.pool.resize(1)
    assert watched.pool.ranks == (0,)
    watched.pids = {0: watched.pids[0]}
    watched.check()


def test_a_resize_ends_after_the_recovery_that_tells_the_ranks_of_it(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new rank can connect to the successor and be ready before the recovery has sent the size to the ranks that stay."""
    watched = Watched(start_pool(2))
    group, recovery = PoolProbe(watched.pool).group, PoolProbe(watched.pool).recovery
    go_on = threading.Event()
    reconnected, await_recovered = group.reconnected, recovery.await_recovered

    def late() -> None:
        assert go_on.wait(PATIENCE)
        reconnected()

    def awaited(timeout: float | None) -> bool:
        go_on.set()
        return await_recovered(timeout)

    monkeypatch.setattr(group, "reconnected", late)
    monkeypatch.setattr(recovery, "await_recovered", awaited)
    lost = threading.Event()
    watched.pool.client.on_lost(lambda reason: lost.set())
    watched.kill_coordinator()
    assert lost.wait(PATIENCE)
    watched.pool.resize(3)
    found = watched.pool.pull("os.environ['WORLD_SIZE']", [0, 1])
    go_on.set()
    assert found == {0: "3", 1: "3"}


@pytest.mark.soak
def test_a_coordinator_that_dies_before_a_pool_takes_it_is_replaced(start_pool: StartPool) -> None:
    warm = Prestart.begin()
    warm._done.wait(30)
    assert warm._processes is not None
    os.kill(warm._processes.coordinator.pid, signal.SIGKILL)
    Watched(start_pool(2, warm=warm)).check()


def test_a_coordinator_that_can_not_be_replaced_ends_the_pool(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(start_pool(1))
    out = Recorder()
    run = watched.pool.start_run("print('on', flush=True)\ntime.sleep(60)", out=out)
    out.wait_for("on", ranks=(0,))

    def fail(timeout: float) -> None:
        raise StartError("no memory")

    monkeypatch.setattr(PoolProbe(watched.pool).coordinator, "respawn", fail)
    watched.kill_coordinator()
    assert set(run.wait(30).deaths) == {0}
    with pytest.raises(
        StartError, match=r"broken down: its coordinator ended \(killed by SIGKILL\).*no memory"
    ):
        watched.pool.run("1")


def test_recovery_that_raises_any_error_repairs_the_next_death(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(start_pool(1))
    with monkeypatch.context() as failing:
        failing.setattr(PoolProbe(watched.pool).joining, "resend_pending", lambda: 1 // 0)
        again = threading.Event()
        watched.pool.client.on_reconnected(lambda world: again.set())
        watched.kill_coordinator()
        assert again.wait(PATIENCE)
        assert PoolProbe(watched.pool).recovery.await_recovered(PATIENCE)
    watched.kill_coordinator()
    watched.check()


def test_recovery_that_raises_any_error_without_connection_breaks_pool(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(start_pool(1))

    def fail(timeout: float) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(PoolProbe(watched.pool).coordinator, "respawn", fail)
    watched.kill_coordinator()
    eventually(lambda: watched.pool.broken)
    with pytest.raises(StartError, match="can't start new thread"):
        watched.pool.run("1")


@pytest.mark.soak
def test_a_pool_is_stopped_while_it_is_put_back(start_pool: StartPool) -> None:
    pool = start_pool(2)
    family = psutil.Process().children(recursive=True)
    os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
    pool.stop()
    _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []


# -- the fork server -------------------------------------------------------------------------------------------------


def test_the_fork_server_dies_while_cells_compute_and_print(start_pool: StartPool) -> None:
    watched = Watched(start_pool(2))
    out = Recorder()
    run = watched.pool.start_run(
        "for i in range(2000):\n    x = hvd.allreduce(np.ones(8) * me, op=hvd.Sum)\n    print('step', i, me)\nx[0]",
        out=out,
    )
    out.wait_for("step 9 ", ranks=(0, 1))
    before = watched.warm
    watched.kill_server()
    results = run.wait(60)
    assert results.errors == {}
    assert list(results) == [1.0, 1.0]
    for rank in (0, 1):
        assert out.text[rank] == "".join(f"step {i} {rank}\n" for i in range(2000))
    assert watched.told() == (
        "the process that ranks are forked from ended (killed by SIGKILL) and was replaced; the ranks and their "
        "variables are intact"
    )
    assert watched.warm != before
    watched.check()


def test_ranks_are_added_replaced_and_ended_after_the_fork_server_has_died(start_pool: StartPool) -> None:
    watched = Watched(start_pool(3))
    watched.kill_server()
    os.kill(watched.pids[1], signal.SIGKILL)
    while 1 not in watched.pool.lost:
        PoolProbe(watched.pool).recovery.await_recovered(30)
    assert watched.pool.repair() == (1,)
    watched.kill_server()
    watched.pool.resize(4)
    assert watched.pool.run(SET_UP, ranks=[1, 3]).errors == {}
    watched.pids |= watched.pool.pull("os.getpid()", [1, 3])
    watched.check()
    watched.kill_server()
    watched.pool.restart([0])
    watched.pool.resize(2)
    assert watched.pool.run(SET_UP, ranks=[0]).errors == {}
    watched.pids = {1: watched.pids[1], **watched.pool.pull("os.getpid()", [0])}
    watched.check()


def test_coordinator_and_fork_server_die_together(start_pool: StartPool) -> None:
    watched = Watched(start_pool(2))
    out = Recorder()
    run = watched.pool.start_run("for i in range(30_000):\n    print('line', i, me)", out=out)
    out.wait_for("line 9 ", ranks=(0, 1))
    watched.kill_server()
    watched.kill_coordinator()
    assert run.wait(60).errors == {}
    for rank in (0, 1):
        assert out.text[rank] == "".join(f"line {i} {rank}\n" for i in range(30_000))
    watched.check()


@pytest.mark.soak
def test_a_fork_server_that_can_not_be_replaced_ends_the_pool(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(start_pool(1))
    out = Recorder()
    run = watched.pool.start_run("print('on', flush=True)\ntime.sleep(60)", out=out)
    out.wait_for("on", ranks=(0,))

    def fail() -> None:
        raise StartError("no memory")

    monkeypatch.setattr(PoolProbe(watched.pool).fork_server, "respawn", fail)
    watched.kill_server()
    assert set(run.wait(30).deaths) == {0}
    with pytest.raises(StartError, match=r"broken down:.*forked from ended \(killed by SIGKILL\).*no memory"):
        watched.pool.run("1")


def test_only_the_rank_that_is_restarted_is_new(start_pool: StartPool) -> None:
    watched = Watched(start_pool(3))
    watched.pool.restart([1])
    assert watched.pool.ranks == (0, 1, 2)
    assert watched.pool.run(SET_UP, ranks=[1]).errors == {}
    new = watched.pool.pull("os.getpid()", [1])[1]
    assert new != watched.pids[1]
    watched.pids[1] = new
    watched.check()


class Surroundings:
    """Surroundings of a CoordinatorRecovery, with one rank that the coordinator has given up."""

    closed = False

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.told: list[object] = []
        self.killed = threading.Event()
        self.look: Callable[[Membership], None] = lambda membership: None
        self.returned: Callable[[int, int, float], None] = lambda rank, pid, seconds: None

    # the client
    def on_lost(self, callback: object) -> None: ...

    def on_membership(self, callback: Callable[[Membership], None]) -> None:
        self.look = callback

    def on_returned(self, callback: Callable[[int, int, float], None]) -> None:
        self.returned = callback

    def membership(self) -> Membership:
        return Membership(deaths=(Death(1, self.process.pid, 0.0, "silent for 30 s"),))

    # the runs
    def rank_reconnected(self, rank: int) -> None:
        self.told.append(("missed", rank))

    # the group
    def cut_off(self, membership: Membership) -> list[int]:
        return [1]

    def pids(self) -> dict[int, int]:
        return {1: self.process.pid}

    def set_exit_reason(self, rank: int, pid: int, reason: str) -> None:
        self.told.append((rank, pid, reason))

    def kill(self, ranks: list[int]) -> None:
        assert ranks == [1]
        self.process.kill()
        self.killed.set()

    def handle(self, event: object) -> None:
        self.told.append(event)


def rebuilder_in(
    surroundings: Any, tell: Callable[[str], object] = pytest.fail, *, near: bool = True
) -> CoordinatorRecovery:
    """Return a rebuilder of a pool whose coordinator neither dies nor is given up."""
    surroundings.notice = tell
    surroundings.recovery_failed = surroundings.coordinator_restored = pytest.fail
    return CoordinatorRecovery(
        surroundings,
        surroundings,
        surroundings,
        surroundings,
        surroundings,
        near=near,
    )


@pytest.mark.parametrize("lives", [True, False])
def test_a_rank_that_the_coordinator_has_given_up_is_ended(lives: bool) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        if not lives:
            process.kill()
            process.wait()
        surroundings: Any = Surroundings(process)
        rebuilder = rebuilder_in(surroundings)
        surroundings.look(surroundings.membership())
        assert surroundings.killed.wait(20 if lives else 2 * CUT_OFF_WITHIN) is lives
        rebuilder.await_recovered(10)
        rebuilder.close()
        rebuilder.join()
        # The process's watcher reports how it ended; this only knows why.
        assert surroundings.told == ([(1, process.pid, "silent for 30 s")] if lives else [])


def test_a_rank_that_is_back_gets_what_it_has_missed_and_the_user_is_told() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        surroundings: Any = Surroundings(process)
        rebuilder = rebuilder_in(surroundings, tell=surroundings.told.append)
        surroundings.returned(1, process.pid + 1, 45.0)  # one that another process has replaced since
        surroundings.returned(1, process.pid, 45.0)
        rebuilder.await_recovered(10)
        rebuilder.close()
        rebuilder.join()
        process.kill()
        assert surroundings.told == [
            ("missed", 1),
            "rank 1 was cut off for 45 s, and is back with its memory",
        ]


def test_a_rank_of_another_host_that_the_coordinator_has_given_up_may_come_back() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:  # it has the same number as the rank's there
        surroundings: Any = Surroundings(process)
        rebuilder = rebuilder_in(surroundings, near=False)
        surroundings.look(surroundings.membership())
        assert not surroundings.killed.wait(2 * CUT_OFF_WITHIN)
        rebuilder.close()
        rebuilder.join()
        process.kill()
        assert surroundings.told == []

"""Pools that outlive the process that started them, and are found by another one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from hvdlab.collectives import system
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.failover.supervisor import server_of
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook import kept_pools
from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.notebook.kept_pools import OrphanedCell
from hvdlab.kernel_ext.notebook.kept_pools import main as pools_command
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.prestart import PoolProcesses
from hvdlab.kernel_ext.notebook.registry import KeptPoolEntry, KeptPoolRegistry, table
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.server import DetachedSupervisor
from hvdlab.launch.kept import KeptJob, LeaseOwner
from hvdlab.launch.processes import readable
from support.interrupting import press_ctrl_c
from support.patience import GONE, PATIENCE, eventually
from support.pool_keeper import KEEPER, keeper, kill
from support.pool_probe import PoolProbe
from support.pool_recorder import Recorder

SPOKEN = runpy.run_path(str(KEEPER))
INTACT = "(os.getpid(), hash(memory.tobytes()) == secret, hvd.allreduce(np.ones(2) * (me + 1), op=hvd.Sum).tolist())"
StartPool = Callable[..., Pool]


@pytest.fixture(autouse=True)
def nothing_left(surroundings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A registry of the test's own; no pool is left at the end, of any starter."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    left = KeptPoolRegistry().all()
    for kept in left:
        for process in (kept.owner, kept.warm, kept.coordinator):
            if process.lives and process.pid != os.getpid():
                os.kill(process.pid, signal.SIGKILL)
    assert left == []
    _, alive = psutil.wait_procs(ours(tmp_path), timeout=GONE)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not (tmp_path / system.private_name()).exists()


def ours(runtime: Path) -> list[psutil.Process]:
    """Return processes that were started with this runtime directory, also those that have no owner now."""
    found = []
    for process in psutil.process_iter():
        # Processes of the whole machine end while they are listed, and some of other users can't be read.
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("XDG_RUNTIME_DIR") == str(runtime):
                found.append(process)
    return found


def check(pool: Pool, pids: dict[int, int]) -> None:
    """Check that all ranks are the same processes, and their next collective is right."""
    results = pool.run(INTACT, timeout=60)
    assert results.errors == {}
    total = [sum(range(1, len(pids) + 1))] * 2
    assert {rank: results[rank] for rank in results.ranks} == {
        rank: (pid, True, total) for rank, pid in pids.items()
    }


@pytest.mark.parametrize("end", ["killed", pytest.param("exits", marks=pytest.mark.soak)])
def test_a_pool_outlives_its_notebook_and_is_attached_to(end: str) -> None:
    process = keeper("3")
    (kept,) = KeptPoolRegistry().all()
    assert (kept.name, kept.size, kept.owner.pid) == ("mine", 3, process.pid)
    if end == "killed":
        kill(process)
    else:
        process.communicate("", timeout=PATIENCE)
        assert process.returncode == 0
    with Pool.attach("mine") as pool:
        assert pool.name == "mine"
        assert pool.ranks == (0, 1, 2)
        pids = pool.pull("mine")
        check(pool, pids)
        out = Recorder()
        assert list(pool.run("print('rank', me)\nme", out=out)) == [0, 1, 2]
        assert out.text == {rank: f"rank {rank}\n" for rank in range(3)}
        assert KeptPoolRegistry().all()[0].owner.pid == os.getpid()


def test_pools_that_launchers_keep_are_listed_beside_those_of_this_host() -> None:
    owner = LeaseOwner(7, 70, "there#1", "/work")
    jobs = [KeptJob("a", 4, "auto", "ray", 0.0, owner, "1"), KeptJob("b", 2, "auto", "ray", 0.0, None, "1")]
    head, first, second = table([], jobs).splitlines()
    assert head.split()[:4] == ["name", "ranks", "launcher", "plane"]
    assert first.split()[:4] == ["a", "4", "ray", "auto"]
    assert first.endswith("process 7 on there in /work")
    assert second.endswith("nobody")
    assert "no pool is kept" in table([])


@pytest.mark.soak
def test_an_attached_pool_can_do_all_that_any_pool_can() -> None:
    kill(keeper("2"))
    with Pool.attach("mine") as pool:
        pids = pool.pull("mine")
        pool.resize(3)
        assert KeptPoolRegistry().all()[0].size == 3
        assert pool.pull("os.environ['WORLD_SIZE']", [0, 1]) == {0: "3", 1: "3"}
        os.kill(pids[1], signal.SIGKILL)
        while 1 not in pool.lost:
            PoolProbe(pool).recovery.await_recovered(10)
        assert pool.lost[1].startswith("killed by SIGKILL")
        assert pool.repair() == (1,)
        pool.restart([2])
        assert pool.pull("mine", [0]) == {0: pids[0]}
        assert pool.run("import os; os.environ['MASTER_PORT']").ranks == (0, 1, 2)
        os.kill(PoolProbe(pool).fork_server.pid, signal.SIGKILL)
        assert pool.run("1").errors == {}
        pool.resize(2)
        assert pool.ranks == (0, 1)
        assert pool.cluster is not None


def test_ranks_that_ended_in_the_meantime_are_known_and_can_be_replaced() -> None:
    process = keeper("3")
    kept = KeptPoolRegistry().get("mine")
    ranks = {p.name(): p for p in psutil.Process(kept.warm.pid).children()}
    kill(process)
    ranks["hvd-rank-1"].kill()
    psutil.wait_procs([ranks["hvd-rank-1"]], timeout=GONE)
    with Pool.attach("mine") as pool:
        assert pool.ranks == (0, 2)
        while pool.lost[1].startswith("it ended while"):
            PoolProbe(pool).recovery.await_recovered(10)
        assert pool.lost[1].startswith("killed by SIGKILL")
        pids = pool.pull("mine")
        assert pool.repair() == (1,)
        assert pool.pull("mine", [0, 2]) == pids


def test_what_runs_goes_on_and_can_be_interrupted() -> None:
    process = keeper("2", "busy")
    kill(process)
    with Pool.attach("mine") as pool:
        assert {status.state for status in pool.status()} == {"running"}
        run = pool.start_run("me", out=NullSink())
        pool.interrupt()
        assert list(run.wait(30)) == [0, 1]
        check(pool, pool.pull("mine"))


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Where cells wait; called with a rank it lets that go on."""
    monkeypatch.setenv("DOOR", str(tmp_path / "door-"))
    for rank in range(2):
        os.mkfifo(tmp_path / f"door-{rank}")

    def open_door(rank: int) -> None:
        (tmp_path / f"door-{rank}").write_text("go")

    return open_door


def test_what_a_cell_wrote_while_nobody_was_there_is_shown_to_who_comes_next(
    doors: Callable[[int], None],
) -> None:
    process = keeper("2", "waiting")
    kill(process)
    doors(0)
    found: list[OrphanedCell] = []
    out = Recorder()

    def show(cell: OrphanedCell) -> Recorder:
        found.append(cell)
        return out

    with Pool.attach("mine", show=show) as pool:
        (run,) = pool.resumed
        assert pool.client.recording.labels[run.cell] == "[7] of the notebook before"
        doors(1)
        results = run.wait(60)
        assert [results[rank] for rank in (0, 1)] == [0, 1]
        assert (found[0].label, found[0].ranks) == ("[7]", (0, 1))
        assert 1 in found[0].running
        for rank in (0, 1):
            assert out.text[rank].endswith("1" * (1 << 20) + "\nthe end\n")
        assert pool.transcripts.find("7") is not None
        check(pool, pool.pull("mine"))
        # A rank reports the end of its cell before it is through with it.
        eventually(lambda: pool.status()[0].state == "idle")


def test_a_cell_of_a_pool_that_is_let_go_is_not_over(doors: Callable[[int], None]) -> None:
    pool = Pool.start(2, keep="mine")
    out, later = Recorder(), Recorder()
    pool.run(SPOKEN["SET_UP"])
    run = pool.start_run(SPOKEN["CELLS"]["waiting"], out=out, label="[3]")
    out.wait_for("on", [0, 1])
    pool.detach()
    assert set(run.wait(30).deaths) == {0, 1}
    for rank in (0, 1):
        doors(rank)
    with Pool.attach("mine", show=lambda cell: later) as pool:
        (again,) = pool.resumed
        assert again.cell == run.cell
        assert list(again.wait(60)) == [0, 1]
        assert all(later.text[rank].endswith("the end\n") for rank in (0, 1))
    pool = Pool.start(1)
    assert pool.resumed == ()
    pool.stop()


def act(process: subprocess.Popen[str], what: str) -> None:
    """Have a keeper of an elastic cell do this."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "did\n"


def pids_of(pool: Pool) -> dict[int, int]:
    """Rank to its process, also while ranks are busy or leave."""
    return {status.rank: status.pid for status in pool.status()}


def last_size(out: Recorder, rank: int) -> int:
    """Return the number of ranks with which this one has trained last, by its reports here."""
    sizes = re.findall(r"size (\d+)", out.text.get(rank, ""))
    return int(sizes[-1]) if sizes else 0


def wait_for_size(out: Recorder, size: int, ranks: Sequence[int]) -> None:
    out.wait_until(lambda: {last_size(out, rank) for rank in ranks} == {size}, PATIENCE)


def test_ranks_join_and_leave_an_elastic_cell_of_the_notebook_before() -> None:
    kill(keeper("2", "elastic"))
    out = Recorder()
    with Pool.attach("mine", show=lambda cell: out) as pool:
        (run,) = pool.resumed
        assert pool.elastic().cells == [("[7]", Bounds(2, 3), (0, 1))]
        with pytest.raises(InvalidRequestError, match=r"4 ranks are more than --max-np 3 of cell \[7\]"):
            pool.resize(4)
        before = pids_of(pool)
        pool.resize(3)
        wait_for_size(out, 3, [0, 1, 2])
        assert pool.newcomers == ()

        # Over the death of the coordinator: its successor is sent the cell again, and no rank runs it a second time.
        back = threading.Event()
        pool.client.on_reconnected(lambda membership: back.set())
        os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
        assert back.wait(PATIENCE)
        assert PoolProbe(pool).recovery.await_recovered(PATIENCE)

        os.kill(before[0], signal.SIGKILL)
        wait_for_size(out, 2, [1, 2])
        assert pool.repair() == (0,)
        wait_for_size(out, 3, [0, 1, 2])
        pool.resize(2)
        out.wait_for_note("rank 2 has left; nothing is lost by that", PATIENCE)
        wait_for_size(out, 2, [0, 1])
        os.kill(before[1], signal.SIGUSR1)
        results = run.wait(PATIENCE)
        assert results.ok, (results.root_cause, out.notes)
        assert results.ranks == (0, 1)
        assert results[0] == results[1]
        step, sizes = results[1]
        assert sum(sizes.values()) == step
        assert pids_of(pool)[1] == before[1]
        assert list(pool.run("hvd.allreduce(np.ones(1), op=hvd.Sum).item()")) == [2.0, 2.0]


def test_a_cell_trains_on_when_coordinators_and_a_rank_die_while_nobody_is_attached() -> None:
    kill(keeper("3", "elastic"))
    kept = KeptPoolRegistry().get("mine")
    second = replace_coordinator(kept, kept.coordinator.pid)
    with Client.connect(kept.address, kept.client_token) as client:
        world = client.wait_for(lambda now: now.formed == (0, 1, 2), PATIENCE)
        os.kill(world.members[0].pid, signal.SIGKILL)
        client.wait_for(lambda now: now.formed == (1, 2), PATIENCE)
    replace_coordinator(kept, second)
    out = Recorder()
    with Pool.attach("mine", show=lambda cell: out) as pool:
        (run,) = pool.resumed
        assert list(pool.lost) == [0]
        out.wait_for_note("the coordinator ended, and was replaced, before this notebook attached", PATIENCE)
        wait_for_size(out, 2, [1, 2])
        assert pool.repair() == (0,)
        wait_for_size(out, 3, [0, 1, 2])
        assert {rank: pids_of(pool)[rank] for rank in (1, 2)} == {m.rank: m.pid for m in world.members[1:]}
        os.kill(pids_of(pool)[1], signal.SIGUSR1)
        results = run.wait(PATIENCE)
        assert results.ok, (results.root_cause, out.notes)
        step, sizes = results[2]
        assert sum(sizes.values()) == step


def kill_coordinator_too(died: bool) -> None:
    """The notebook has ended; if its coordinator ``died`` as well, the next notebook finds a successor."""
    if died:
        kept = KeptPoolRegistry().get("mine")
        replace_coordinator(kept, kept.coordinator.pid)


COORDINATOR_DIED = pytest.mark.parametrize(
    "died", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["coordinator-lives", "coordinator-died"]
)


@COORDINATOR_DIED
def test_a_rank_that_waits_to_be_let_in_joins_for_the_next_notebook(
    doors: Callable[[int], None], died: bool
) -> None:
    process = keeper("2", "held")
    act(process, "grow")
    kill(process)
    kill_coordinator_too(died)
    out = Recorder()
    with Pool.attach("mine", show=lambda cell: out) as pool:
        (run,) = pool.resumed
        pool.client.wait_for(lambda now: now.waiting == (2,), PATIENCE)
        assert pool.elastic().members[2] == "waits to be let in"
        assert pool.newcomers == ()
        doors(1)
        wait_for_size(out, 3, [0, 1, 2])
        run.interrupt()
        assert set(run.wait(PATIENCE).errors) == {0, 1, 2}
        assert pool.newcomers == (), "it has entered, and knows all"


@pytest.mark.soak
def test_a_rank_whose_cell_ended_before_it_entered_is_a_newcomer_for_the_next_notebook(
    doors: Callable[[int], None],
) -> None:
    process = keeper("2", "held")
    act(process, "grow")
    kill(process)
    with Pool.attach("mine") as pool:
        (run,) = pool.resumed  # an elastic cell goes on with the pool, also if nothing shows its output
        pool.client.wait_for(lambda now: now.waiting == (2,), PATIENCE)
        run.interrupt()
        assert set(run.wait(PATIENCE).errors) == {0, 1, 2}
        assert pool.newcomers == (2,)
        failed = pool.run("state")
        assert failed.errors[2].ename == "NameError"
        assert set(failed.newcomers) == {2}


@pytest.mark.parametrize("died", [False, True], ids=["coordinator-lives", "coordinator-died"])
def test_a_rank_that_was_let_go_leaves_for_the_next_notebook(
    doors: Callable[[int], None], died: bool
) -> None:
    process = keeper("3", "held")
    act(process, "let go")
    kill(process)
    kill_coordinator_too(died)
    out = Recorder()
    with Pool.attach("mine", show=lambda cell: out) as pool:
        (run,) = pool.resumed
        assert pool.ranks == (0, 1)
        assert pool.elastic().members[2] == "leaves at the next commit"
        out.wait_for_note("rank 2 leaves at the next commit", PATIENCE)
        doors(1)
        wait_for_size(out, 2, [0, 1])
        out.wait_for_note("rank 2 has left; nothing is lost by that", PATIENCE)
        os.kill(pids_of(pool)[0], signal.SIGUSR1)
        results = run.wait(PATIENCE)
        assert results.ok, (results.root_cause, out.notes)
        assert results.ranks == (0, 1)
        step, sizes = results[0]
        assert sum(sizes.values()) == step, "no step was lost"


@pytest.mark.soak
@pytest.mark.parametrize("died", [False, True], ids=["coordinator-lives", "coordinator-died"])
def test_a_rank_that_was_not_sent_the_cell_before_the_notebook_ended_is_sent_it_by_the_next(
    doors: Callable[[int], None], died: bool
) -> None:
    process = keeper("2", "held")
    act(process, "start a rank")
    kill(process)
    kill_coordinator_too(died)
    out = Recorder()
    with Pool.attach("mine", show=lambda cell: out) as pool:
        (run,) = pool.resumed
        out.wait_for_note("rank 2 joins at the others' next commit", PATIENCE)
        doors(1)
        wait_for_size(out, 3, [0, 1, 2])
        os.kill(pids_of(pool)[0], signal.SIGUSR1)
        results = run.wait(PATIENCE)
        assert results.ok, (results.root_cause, out.notes)
        assert results.ranks == (0, 1, 2)


@pytest.mark.soak
@pytest.mark.parametrize("died", [False, True], ids=["coordinator-lives", "coordinator-died"])
def test_too_few_ranks_are_told_of_and_repaired_in_an_elastic_cell_of_the_notebook_before(died: bool) -> None:
    process = keeper("2", "elastic")
    kept = KeptPoolRegistry().get("mine")
    (first, second) = sorted(psutil.Process(kept.warm.pid).children(), key=psutil.Process.name)
    kill(process)
    kill_coordinator_too(died)
    first.kill()
    psutil.wait_procs([first], timeout=GONE)
    out = Recorder()
    with Pool.attach("mine", show=lambda cell: out) as pool:
        (run,) = pool.resumed
        out.wait_for_note("1 of at least 2 ranks is left", PATIENCE)
        assert pool.repair() == (0,)
        wait_for_size(out, 2, [0, 1])
        os.kill(second.pid, signal.SIGUSR1)
        results = run.wait(PATIENCE)
        assert results.ok, (results.root_cause, out.notes)
        assert results.ranks == (0, 1)


@pytest.mark.soak
def test_without_a_place_to_show_it_nothing_is_left_of_a_cell(doors: Callable[[int], None]) -> None:
    process = keeper("1", "waiting")
    kill(process)
    with Pool.attach("mine") as pool:
        assert pool.resumed == ()
        doors(0)
        assert list(pool.run("n", timeout=60)) == [11]
        assert kept_pools.find_orphans(PoolProbe(pool).runs.requests, PoolProbe(pool).group.pids()) == (
            [],
            (),
        )


@pytest.mark.soak
def test_a_cell_that_wrote_more_than_a_window_while_nobody_listened_goes_on() -> None:
    process = keeper("1", "talkative")
    kill(process)
    with Pool.attach("mine") as pool:
        assert list(pool.run("written", timeout=60)) == [64]


def test_a_pool_that_is_in_use_is_refused_with_who_has_it() -> None:
    process = keeper("1")
    with pytest.raises(
        InvalidRequestError, match=rf"pool `mine` is in use by process {process.pid} in .*detach"
    ):
        Pool.attach("mine")
    with pytest.raises(InvalidRequestError, match="in use by process"):
        kept_pools.stop_local("mine")
    assert process.stdin is not None
    process.stdin.write("detach\n")
    process.stdin.flush()
    assert process.stdout is not None
    assert process.stdout.readline() == "detached\n"
    with Pool.attach("mine") as pool:
        with pytest.raises(InvalidRequestError, match="in use by this very process"):
            Pool.attach("mine")
        assert len(pool.pull("mine")) == 1
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


@pytest.mark.soak
def test_a_pool_is_detached_and_attached_to_in_one_process(doors: Callable[[int], None]) -> None:
    pool = Pool.start(2, keep="")
    assert pool.name == "pool"
    pool.run("import os\nx = 5")
    out = Recorder()
    run = pool.start_run(
        "print('on', flush=True)\nopen(os.environ['DOOR'] + os.environ['RANK']).read()\nx = 6", out=out
    )
    out.wait_for("on", ranks=(0, 1))
    pool.detach()
    assert set(run.wait(GONE).deaths) == {0, 1}
    for rank in (0, 1):
        doors(rank)
    assert pool.state == "stopped"
    assert threading.active_count() == 1
    with Pool.attach("pool") as again:
        assert again.pull("x") == {0: 6, 1: 6}


def test_interrupted_detach_leaves_the_pool_to_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool.start(1, keep="mine")
    disconnect = kept_pools.LocalKeptPool.disconnect

    def interrupted(self: kept_pools.LocalKeptPool, processes: PoolProcesses) -> None:
        press_ctrl_c()
        disconnect(self, processes)

    with monkeypatch.context() as patch:
        patch.setattr(kept_pools.LocalKeptPool, "disconnect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.detach()
        eventually(lambda: not KeptPoolRegistry().get("mine").owner.lives)
    Pool.attach("mine").stop()


@pytest.mark.soak
def test_names() -> None:
    with Pool.start(1, keep="mine") as first:
        with pytest.raises(InvalidRequestError, match="there is a pool `mine` already"):
            Pool.start(1, keep="mine")
        with pytest.raises(InvalidRequestError, match="names begin with a letter"):
            Pool.start(1, keep="4")
        with pytest.raises(InvalidRequestError, match="launcher `mpi` can't be kept"):
            Pool.start(1, keep="other", launcher="mpi")
        with pytest.raises(InvalidRequestError, match="there is no pool `your`; there is `mine`"):
            Pool.attach("your")
        with pytest.raises(InvalidRequestError, match="end with this process"), Pool.start(1) as other:
            other.detach()
        with Pool.start(1, keep="") as second, Pool.start(1, keep="") as third:
            assert (first.name, second.name, third.name) == ("mine", "pool", "pool-2")
            assert [kept.name for kept in KeptPoolRegistry().all()] == ["mine", "pool", "pool-2"]
    assert KeptPoolRegistry().all() == []
    with pytest.raises(InvalidRequestError, match="none is kept here"):
        Pool.attach("mine")


@pytest.mark.soak
def test_coordinators_and_fork_servers_that_die_are_replaced_in_a_kept_pool() -> None:
    pool = Pool.start(2, keep="mine")
    pool.run("import os; mine = os.getpid()")
    pids = pool.pull("mine")
    os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
    dead = PoolProbe(pool).fork_server.pid
    os.kill(dead, signal.SIGKILL)
    assert pool.run("1").errors == {}
    while PoolProbe(pool).fork_server.pid == dead:
        PoolProbe(pool).recovery.await_recovered(30)
    pool.detach()
    with Pool.attach("mine") as again:
        assert again.pull("os.getpid()") == pids == again.pull("mine")


def test_coordinator_is_replaced_although_the_entry_can_not_be_written() -> None:
    def fail(registry: KeptPoolRegistry, kept: KeptPoolEntry) -> None:
        raise StartError("No space left on device")

    def replace(pool: Pool) -> None:
        again = threading.Event()
        pool.client.on_reconnected(lambda world: again.set())
        os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
        assert again.wait(PATIENCE)
        assert PoolProbe(pool).recovery.await_recovered(PATIENCE)

    with Pool.start(1, keep="mine") as pool:
        pool.run("x = 5")
        with pytest.MonkeyPatch.context() as full:
            full.setattr(KeptPoolRegistry, "write", fail)
            replace(pool)
            assert any("could not be recorded" in said for said in pool.news())
            replace(pool)
            written = KeptPoolRegistry().get("mine").coordinator
        assert written.pid != PoolProbe(pool).coordinator.pid
        PoolProbe(pool).update_kept_entry()
        assert KeptPoolRegistry().get("mine").coordinator.pid == PoolProbe(pool).coordinator.pid
        assert pool.pull("x") == {0: 5}


def test_a_pool_is_let_go_before_the_successor_of_its_fork_server_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entry names the successor, which stays with the ranks."""
    respawn, disconnect = ForkServer.respawn, kept_pools.LocalKeptPool.disconnect
    lost, letting_go = threading.Event(), threading.Event()

    def late(server: ForkServer) -> None:
        lost.set()
        assert letting_go.wait(PATIENCE)
        respawn(server)

    def let_go(kept: kept_pools.LocalKeptPool, processes: PoolProcesses) -> None:
        letting_go.set()
        disconnect(kept, processes)

    pool = Pool.start(2, keep="mine")
    pool.run("import os; mine = os.getpid()")
    pids = pool.pull("mine")
    dead = PoolProbe(pool).fork_server.pid
    with monkeypatch.context() as patched:
        patched.setattr(ForkServer, "respawn", late)
        patched.setattr(kept_pools.LocalKeptPool, "disconnect", let_go)
        os.kill(dead, signal.SIGKILL)
        assert lost.wait(PATIENCE)
        pool.detach()
    kept = KeptPoolRegistry().get("mine")
    assert kept.warm.pid != dead
    assert kept.warm.lives
    with Pool.attach("mine") as again:
        assert again.pull("os.getpid()") == pids == again.pull("mine")


def next_coordinator(kept: KeptPoolEntry, before: int) -> int:
    """Return the process of the coordinator that takes the place of this one, while no client is attached."""
    deadline = Deadline(30)
    while (pid := server_of(Path(kept.directory), 5)) in (0, before):
        assert not deadline.expired, "nobody has replaced the coordinator"
        os.sched_yield()
    return pid


def replace_coordinator(kept: KeptPoolEntry, pid: int) -> int:
    """Kill this coordinator while no client is attached. Returns the process of the next one."""
    os.kill(pid, signal.SIGKILL)
    return next_coordinator(kept, pid)


@pytest.mark.parametrize("soon", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_coordinator_that_dies_while_nobody_is_attached_is_replaced(soon: bool) -> None:
    """``soon``: at the same moment as its notebook, and the next one while ranks are on their way to it."""
    process = keeper("2")
    kept = KeptPoolRegistry().get("mine")
    if soon:
        os.kill(kept.coordinator.pid, signal.SIGKILL)
    kill(process)
    if not soon:
        os.kill(kept.coordinator.pid, signal.SIGKILL)
    second = next_coordinator(kept, kept.coordinator.pid)
    if not soon:
        client = Client.connect(kept.address, kept.client_token)
        client.wait_for(lambda world: len(world.members) == 2, 30)
        client.close()
    os.kill(second, signal.SIGKILL)
    third = next_coordinator(kept, second)
    with Pool.attach("mine") as pool:
        pids = pool.pull("mine")
        check(pool, pids)
        assert KeptPoolRegistry().get("mine").coordinator.pid == third
        os.kill(third, signal.SIGKILL)
        check(pool, pids)
        PoolProbe(pool).recovery.await_recovered(30)
        pool.detach()
        fourth = KeptPoolRegistry().get("mine").coordinator.pid
        os.kill(fourth, signal.SIGKILL)
        os.waitpid(fourth, 0)  # a child of this process, which had started it
        pool = Pool.attach("mine")
        check(pool, pids)
        pool.stop()


def test_a_coordinator_that_lost_its_starter_before_it_was_found_leaves_the_directory_to_the_next() -> None:
    """Two may be started for one that died: by the notebook, which is killed, and by the process that replaces it."""
    coordinator = CoordinatorProcess.start(keep=True, linger=True)
    try:
        coordinator.respawn(PATIENCE)
        pid = os.pidfd_open(coordinator.pid)
        coordinator.release()
        assert readable(pid, 20)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pid, os.WEXITED)  # a child that was released must not be waited for
        os.close(pid)
        assert (coordinator.directory / "coordinator").exists()
    finally:
        coordinator.close()


def test_a_coordinator_that_lives_gets_no_successor_although_its_file_is_gone() -> None:
    coordinator = CoordinatorProcess.start(keep=True, linger=True)
    supervisor = DetachedSupervisor(coordinator.directory)
    try:
        (coordinator.directory / "handover").unlink()
        supervisor.begin(1)
        assert supervisor.successor == 0
        assert supervisor.process >= 0
        assert not supervisor.has_ended()
        os.kill(coordinator.pid, signal.SIGKILL)
        assert readable(supervisor.process, GONE)
        assert supervisor.has_ended()
    finally:
        supervisor.release()
        coordinator.close()


@pytest.mark.soak
def test_ranks_that_died_with_the_coordinator_are_lost_and_can_be_repaired() -> None:
    kill(keeper("3"))
    kept = KeptPoolRegistry().get("mine")
    ranks = sorted(psutil.Process(kept.warm.pid).children(), key=lambda child: child.pid)
    ranks[-1].kill()
    psutil.wait_procs(ranks[-1:], timeout=GONE)
    os.kill(kept.coordinator.pid, signal.SIGKILL)
    next_coordinator(kept, kept.coordinator.pid)
    with Pool.attach("mine") as pool:
        assert pool.size == 3
        assert list(pool.lost) == [2]
        pids = pool.pull("mine")
        check(pool, pids)
        pool.repair()
        assert pool.ranks == (0, 1, 2)


@pytest.mark.soak
@pytest.mark.parametrize("end", ["stop", "ranks"])
def test_nothing_is_left_of_a_pool_whose_coordinator_was_replaced(end: str) -> None:
    kill(keeper("2"))
    kept = KeptPoolRegistry().get("mine")
    ranks = psutil.Process(kept.warm.pid).children()
    os.kill(kept.coordinator.pid, signal.SIGKILL)
    coordinator = psutil.Process(next_coordinator(kept, kept.coordinator.pid))
    if end == "stop":
        assert pools_command(["stop", "mine"]) == 0
    for process in ranks if end == "ranks" else []:
        process.kill()
    _, alive = psutil.wait_procs(
        [coordinator, psutil.Process(kept.warm.pid)] if end == "ranks" else [coordinator], timeout=10
    )
    assert alive == []
    assert KeptPoolRegistry().all() == []
    assert not Path(kept.directory).exists()


def test_what_is_left_of_a_pool_that_is_half_gone_is_cleared_up(tmp_path: Path) -> None:
    process = keeper("2")
    kept = KeptPoolRegistry().get("mine")
    family = [p for p in ours(tmp_path) if p.pid in (kept.coordinator.pid, kept.warm.pid)]
    family += psutil.Process(kept.warm.pid).children()
    kill(process)
    half = psutil.Process(kept.warm.pid)
    half.kill()
    psutil.wait_procs([half], timeout=GONE)
    with pytest.raises(InvalidRequestError, match="there is no pool `mine`"):
        Pool.attach("mine")
    _, alive = psutil.wait_procs(family, timeout=GONE)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not Path(kept.directory).exists()


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.soak), "detach"])
def test_an_attached_pool_has_its_coordinator_replaced(how: str) -> None:
    kill(keeper("2"))
    pool = Pool.attach("mine")
    pids = pool.pull("mine")
    for _ in range(2):
        os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
        check(pool, pids)
    if how == "detach":
        PoolProbe(pool).recovery.await_recovered(30)
        pool.detach()
        pool = Pool.attach("mine")
        os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
        check(pool, pids)
    pool.stop()


@pytest.mark.soak
def test_a_coordinator_that_hands_nothing_over_can_not_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    kill(keeper("1"))
    (Path(KeptPoolRegistry().get("mine").directory) / "handover").unlink()
    pool = Pool.attach("mine")
    os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
    while not pool.broken:
        PoolProbe(pool).recovery.await_recovered(10)
    with pytest.raises(StartError, match=r"broken down: its coordinator ended.*did not hand over"):
        pool.run("1")
    pool.stop()


def test_stale_and_strange_files_do_no_harm(tmp_path: Path) -> None:
    directory = tmp_path / system.private_name() / "pools"
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700)
    (directory / "broken.json").write_text("{")
    (directory / "other.json").write_text(json.dumps({"name": "other"}))
    with Pool.start(1, keep="mine"):
        entry = json.loads((directory / "mine.json").read_text())
        assert os.stat(directory / "mine.json").st_mode & 0o777 == 0o600
        for field in ("owner", "coordinator", "warm"):
            entry[field] = {"pid": entry[field]["pid"], "started": 1}  # numbers that others have now
        entry |= {"name": "stale", "directory": str(tmp_path / "gone")}
        (directory / "stale.json").write_text(json.dumps(entry))
        assert [kept.name for kept in KeptPoolRegistry().all()] == ["mine"]
        assert not (directory / "stale.json").exists()
    for name in ("broken.json", "other.json"):
        (directory / name).unlink()
    directory.rmdir()
    directory.parent.rmdir()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "own" / "pools"
    directory.mkdir(parents=True)
    with pytest.raises(StartError, match=r"must belong to you and be closed to others"):
        KeptPoolRegistry(directory).all()


def test_a_name_that_somebody_has_taken_keeps_no_pool_from_being_kept(tmp_path: Path) -> None:
    taken = tmp_path / system.private_name()
    taken.mkdir(mode=0o755)
    with Pool.start(1, keep="mine"):
        assert [kept.name for kept in KeptPoolRegistry().all()] == ["mine"]
        assert list(taken.iterdir()) == []
    taken.rmdir()


def test_the_command_line_lists_and_ends_pools(capsys: pytest.CaptureFixture[str]) -> None:
    assert pools_command([]) == 0
    assert "no pool is kept" in capsys.readouterr().out
    process = keeper("2")
    assert pools_command([]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "ranks", "plane", "started", "in", "use", "by"]
    assert line.split()[:3] == ["mine", "2", "auto"]
    assert f"process {process.pid} in " in line
    kill(process)
    assert table(KeptPoolRegistry().all()).endswith("nobody")
    assert pools_command(["stop", "mine"]) == 0
    assert "`mine` has ended" in capsys.readouterr().out
    with pytest.raises(InvalidRequestError, match="there is no pool `mine`"):
        pools_command(["stop", "mine"])
    with pytest.raises(InvalidRequestError, match="write `hvdlab pools`"):
        pools_command(["start"])

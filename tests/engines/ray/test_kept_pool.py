"""Pools that outlive their notebook on the cluster: found and attached to by another process, ended by a stop or a time limit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.kept_pools import OrphanedCell, kept_elsewhere, this_process
from hvdlab.kernel_ext.notebook.kept_pools import main as pools_command
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.launch.kept import LeaseRefused
from hvdlab.ray.keeper import NAMESPACE
from hvdlab.ray.strategy import create_placement_group
from support.jupyter.live_kernel import LiveKernel
from support.our_processes import our_processes
from support.patience import PATIENCE
from support.pool_keeper import keeper, kill
from support.pool_probe import PoolProbe
from support.pool_recorder import Recorder

SECRET = "(os.getpid(), hash(memory.tobytes()) == secret, hvd.allreduce(np.ones(2), op=hvd.Sum).tolist())"
NODES, CPUS = 2, 3
"""The cluster, and what each of its nodes claims to have."""

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def nothing_left(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pool may be left on the cluster, and all of its CPUs can be had."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("LAUNCHER", "ray")  # for keepers
    yield
    left = pools_there()
    for name in left:
        ray.kill(ray.get_actor(name, NAMESPACE))
    assert left == []
    group, _ = create_placement_group({"CPU": CPUS}, NODES, PATIENCE, "STRICT_SPREAD")
    ray.util.remove_placement_group(group)


def pools_there() -> list[str]:
    """Return the names of the actors of kept pools."""
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE
    ]


def coordinators() -> list[psutil.Process]:
    """Return the coordinators whose starter is a process of Ray's."""
    found = []
    for process in our_processes():
        if "hvdlab.collectives.coordinator" in process.cmdline():
            parent = process.parent()
            if parent is not None and parent.name().startswith("ray::"):
                found.append(process)
    return found


def test_a_pool_outlives_its_notebook_with_all_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    process = keeper("3")
    assert pools_command([]) == 0
    listed = capsys.readouterr().out
    assert listed.splitlines()[0].split()[:3] == ["name", "ranks", "launcher"]
    assert listed.splitlines()[1].split()[:3] == ["mine", "3", "ray"]
    assert f"process {process.pid} on " in listed
    with pytest.raises(InvalidRequestError, match=f"`mine` is in use by process {process.pid} on .*detach"):
        Pool.attach("mine")
    kill(process)
    with Pool.attach("mine", timeout=PATIENCE) as pool:
        assert (pool.name, pool.launcher, pool.ranks) == ("mine", "ray", (0, 1, 2))
        results = pool.run(SECRET, timeout=PATIENCE)
        assert results.errors == {}
        assert {rank: results[rank][1:] for rank in range(3)} == {
            rank: (True, [3.0, 3.0]) for rank in range(3)
        }
        assert len({results[rank][0] for rank in range(3)}) == 3
        out = Recorder()
        pool.run("print('rank', me)", out=out)
        assert out.text == {rank: f"rank {rank}\n" for rank in range(3)}
    assert pools_there() == []


def test_variables_outlive_kernels_that_restart_or_are_killed(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path)
    try:
        kernel.run("%load_ext hvdlab")
        cell = kernel.run("%hvd_pool start 2 --launcher ray --keep mine")
        assert "ranks 0,1 are ready; `%hvd_pool attach mine` in another notebook finds them" in cell.text()
        assert kernel.run("%%hvd_run\nimport os\nx = {os.environ['RANK']: os.getpid()}").error is None
        for end in ("restart", "kill"):
            kernel.manager.restart_kernel(now=end == "kill")
            kernel.client.wait_for_ready(timeout=PATIENCE)
            kernel.run("%load_ext hvdlab")
            assert kernel.run("%hvd_pool list").lines()[1].split()[:3] == ["mine", "2", "ray"]
            cell = kernel.run("%hvd_pool attach mine --launcher ray" if end == "kill" else "%hvd_pool attach")
            assert cell.lines() == ["ranks 0,1 are ready, with all variables"], (
                cell.error,
                cell.text("stderr"),
            )
            cell = kernel.run("%%hvd_run\nassert x == {os.environ['RANK']: os.getpid()}\nprint('intact')")
            assert cell.error is None, cell.error
            assert cell.lines() == ["[0,1] intact"]
        assert kernel.run("%hvd_pool stop").lines() == ["all ranks have ended"]
        assert pools_there() == []
    finally:
        kernel.close()


def test_a_pool_that_is_let_go_can_be_attached_to_again_and_changed() -> None:
    with Pool.start(2, launcher="ray", keep="", timeout=PATIENCE) as pool:
        assert pool.name == "pool"
        assert pool.run("import os; mine = os.getpid()").errors == {}
        pids = pool.pull("mine")
        pool.detach()
        ((job,), problems) = kept_elsewhere()
        assert (job.name, job.size, job.owner, problems) == ("pool", 2, None, [])
    with Pool.attach("pool", timeout=PATIENCE) as pool:
        assert pool.pull("mine") == pids
        pool.resize(3, timeout=PATIENCE)
        os.kill(pids[1], signal.SIGKILL)
        deadline = Deadline(PATIENCE)
        while 1 not in pool.lost:
            assert not deadline.expired
            PoolProbe(pool).recovery.await_recovered(10)
        assert pool.lost[1].startswith("killed by SIGKILL")
        assert pool.repair() == (1,)
        pool.detach()
    with Pool.attach("pool", timeout=PATIENCE) as pool:
        assert pool.ranks == (0, 1, 2)
        assert pool.pull("mine", [0]) == {0: pids[0]}
    assert pools_there() == []


def test_a_rank_that_ends_while_no_notebook_is_there_is_named_with_its_reason() -> None:
    process = keeper("2")
    with pytest.raises(InvalidRequestError, match="there is a pool `mine` already"):
        Pool.start(1, launcher="ray", keep="mine")
    kill(process)
    with Pool.attach("mine", timeout=PATIENCE) as pool:
        pids = pool.pull("mine")
        pool.detach()
    os.kill(pids[1], signal.SIGKILL)
    deadline = Deadline(PATIENCE)
    with Pool.attach("mine", timeout=PATIENCE) as pool:
        while 1 not in pool.lost:
            assert not deadline.expired
            PoolProbe(pool).recovery.await_recovered(10)
        assert "killed by SIGKILL" in pool.lost[1]
        assert pool.pull("mine", [0]) == {0: pids[0]}


def test_what_a_cell_writes_meanwhile_is_shown_to_the_next_notebook(tmp_path: Path) -> None:
    door = tmp_path / "door"
    for rank in range(2):
        os.mkfifo(f"{door}{rank}")
    process = keeper("2", "waiting", DOOR=str(door))
    kill(process)
    for rank in range(2):
        Path(f"{door}{rank}").write_text("go")
    out = Recorder()
    left: list[OrphanedCell] = []

    def show(cell: OrphanedCell) -> Recorder:
        left.append(cell)
        return out

    with Pool.attach("mine", show=show, timeout=PATIENCE) as pool:
        (run,) = pool.resumed
        results = run.wait(PATIENCE)
        assert {rank: results[rank] for rank in range(2)} == {0: 0, 1: 1}
        assert left[0].label == "[7]"
        assert all(text.rstrip().endswith("the end") for text in out.text.values())


def test_a_coordinator_that_dies_is_replaced_with_a_notebook_and_without() -> None:
    process = keeper("2")
    kill(process)
    (first,) = coordinators()
    first.kill()
    with Pool.attach("mine", timeout=PATIENCE) as pool:
        pids = pool.pull("mine")
        (second,) = coordinators()
        assert second.pid != first.pid
        second.kill()
        results = pool.run(SECRET, timeout=PATIENCE)
        assert {rank: results[rank] for rank in results.ranks} == {
            rank: (pid, True, [2.0, 2.0]) for rank, pid in pids.items()
        }


def test_a_pool_that_no_notebook_comes_back_to_ends_after_its_time() -> None:
    process = keeper("2", UNUSED_FOR="1")
    before = coordinators()
    assert len(before) == 1
    process.communicate("", timeout=PATIENCE)
    assert process.returncode == 0
    deadline = Deadline(PATIENCE)
    while pools_there():
        assert not deadline.expired
        time.sleep(0.1)  # Ray gives no notice
    psutil.wait_procs(before, timeout=PATIENCE)
    assert coordinators() == []


def test_a_notebook_that_has_lost_the_pool_says_so_and_leaves_the_ranks_alone() -> None:
    """As when it was suspended for longer than the lease, and another one has come."""
    pool = Pool.start(2, launcher="ray", keep="mine", timeout=PATIENCE)
    assert pool.run("import os; mine = os.getpid()").errors == {}
    pids = pool.pull("mine")
    actor = ray.get_actor("mine", NAMESPACE)
    held = ray.get(actor.claim.remote(this_process()))
    assert isinstance(held, LeaseRefused)
    other = ray.get(actor.claim.remote(this_process(), held.number))
    deadline = Deadline(PATIENCE)
    while not pool.broken:
        assert not deadline.expired
        PoolProbe(pool).recovery.await_recovered(10)
    with pytest.raises(StartError, match=r"the pool `mine` is lost to this notebook: .*attach mine"):
        pool.run("1")
    pool.stop()
    ray.get(actor.detach.remote(other.number))
    with Pool.attach("mine", timeout=PATIENCE) as again:
        assert again.pull("mine") == pids


def test_a_pool_is_ended_without_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    kill(keeper("1"))
    assert pools_command(["stop", "mine"]) == 0
    assert pools_there() == []
    assert "`mine` has ended" in capsys.readouterr().out
    with pytest.raises(InvalidRequestError, match="there is no pool `mine`; none is kept here"):
        Pool.attach("mine")

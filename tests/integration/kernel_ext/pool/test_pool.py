"""A pool of real ranks on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.prestart import Prestart
from support.patience import GONE, PATIENCE, eventually, without_heartbeat
from support.pool_probe import PoolProbe
from support.pool_recorder import Recorder

StartPool = Callable[..., Pool]


def values(pool: Pool, expression: str) -> list[object]:
    results = pool.run(expression)
    assert results.errors == {}
    return [results[rank] for rank in results.ranks]


def test_cells_run_on_all_ranks_with_values_and_output(start_pool: StartPool) -> None:
    pool = start_pool(3)
    out = Recorder()
    results = pool.run("import os\nprint('rank', os.environ['RANK'])\nint(os.environ['RANK']) * 10", out=out)
    assert list(results) == [0, 10, 20]
    assert out.text == {rank: f"rank {rank}\n" for rank in range(3)}
    assert pool.state == "idle"
    assert pool.ranks == (0, 1, 2)


COUNTED = """
import gc, inspect, linecache
from hvdlab.collectives import text
ip = get_ipython()
class Value: pass
def counts():
    gc.collect()
    values = sum(isinstance(o, Value) for o in gc.get_objects())
    return values, len(ip.user_ns["In"]), len(linecache.cache), len(inspect.modulesbyfile), len(text._labels), len(ip.user_ns)
"""


def test_a_program_that_runs_a_cell_in_a_loop_adds_nothing_to_the_ranks_memory(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pool.run(COUNTED)
    for _ in range(2):  # the first report of a cell has a few imports
        assert pool.run("counts(); Value()").errors == {}
    before = values(pool, "counts()")
    for _ in range(20):
        assert pool.run("counts(); Value()").errors == {}
    assert values(pool, "counts()") == before


def test_a_cell_of_the_history_stays_in_it(start_pool: StartPool) -> None:
    pool = start_pool(1)
    for n in (3, 4):
        pool.run(f"'value {n}'", label=f"[{n}]", store_history=True)
    pool.run("'of no history'")
    assert values(pool, "_, __, Out[3], In[4]") == [("value 4", "value 3", "value 3", "'value 4'")]


def test_a_rank_does_not_look_like_a_terminal_to_libraries(start_pool: StartPool) -> None:
    assert values(start_pool(2), "import sys; hasattr(sys, 'ps1')") == [False, False]


def test_a_rank_s_shell_looks_and_works_like_a_notebook_s(start_pool: StartPool) -> None:
    pool = start_pool(1)
    (name,) = pool.run("str(type(get_ipython()))")
    assert name == "<class 'ipykernel.zmqshell.ZMQInteractiveShell'>"
    assert list(pool.run("shell = get_ipython()\nshell.last_execution_succeeded, shell.last_execution_result.result")) == [(True, name)]  # fmt: skip
    assert not pool.run("1 / 0").ok
    assert list(pool.run("shell.last_execution_succeeded")) == [False]
    assert pool.run("%config ZMQInteractiveShell.ast_node_interactivity = 'all'").ok
    assert list(pool.run("shell.ast_node_interactivity, shell.magics_manager.shell is shell, shell.builtin_trap.shell is shell")) == [("all", True, True)]  # fmt: skip


def test_magics_and_the_shell_are_at_hand_in_imported_code(start_pool: StartPool, tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("def shell(): return get_ipython()\ndef leave(): exit()\n")
    pool = start_pool(1)
    pool.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import imported")
    assert list(pool.run("imported.shell() is get_ipython()")) == [True]
    assert (
        pool.run("imported.leave()").errors[0].ename == "NameError"
    )  # as in a notebook, whose `exit` is not Python's
    assert list(pool.run("import builtins; hasattr(builtins, 'exit')")) == [False]


def test_ranks_have_the_notebook_s_directory_path_and_environment(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "yes")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    pool = start_pool(2)
    found = values(
        pool,
        "import os, sys\n"
        "assert 'HVDLAB_TOKEN' not in os.environ\n"
        "names = 'MINE RANK WORLD_SIZE LOCAL_RANK HOROVOD_SIZE HOROVOD_CROSS_SIZE MASTER_ADDR'.split()\n"
        "(os.getcwd(), sys.path[0], *[os.environ[name] for name in names])",
    )
    path = str(tmp_path / "modules")
    assert found == [
        (str(tmp_path), path, "yes", str(rank), "2", str(rank), "2", "1", "127.0.0.1") for rank in (0, 1)
    ]


def test_a_library_that_removes_the_world_s_size_leaves_it_to_the_next_cell(start_pool: StartPool) -> None:
    pool = start_pool(2)
    assert pool.run(
        "import os; del os.environ['WORLD_SIZE']"
    ).ok  # Lightning's Trainer does, at the end of each training
    assert list(pool.run("os.environ['WORLD_SIZE']")) == ["2", "2"]
    assert pool.run("for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'): del os.environ[name]").ok  # on purpose
    assert list(pool.run("os.environ.get('WORLD_SIZE')")) == [None, None]


def test_growing_and_shrinking_leaves_the_others_alone(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pool.run("import os\nmemory = os.getpid()")
    pids = values(pool, "memory")
    pool.resize(4)
    found = "import os\n(globals().get('memory'), os.environ['WORLD_SIZE'])"
    assert values(pool, found) == [(pids[0], "4"), (pids[1], "4"), (None, "4"), (None, "4")]
    pool.resize(3)
    assert pool.ranks == (0, 1, 2)
    assert values(pool, found) == [(pids[0], "3"), (pids[1], "3"), (None, "3")]


def test_a_busy_rank_can_be_shrunk_away(start_pool: StartPool) -> None:
    pool = start_pool(2)
    out = Recorder()
    run = pool.start_run("print('on', flush=True)\nwhile True: pass", ranks=[1], out=out)
    assert out.started.wait(PATIENCE)
    pool.resize(1)
    assert run.wait(PATIENCE).ranks == (1,)
    assert pool.ranks == (0,)


def test_the_end_of_a_killed_rank_is_seen_and_it_can_be_replaced(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_heartbeat(monkeypatch)
    pool = start_pool(3)
    pool.run("kept = 'still here'")
    pids = values(pool, "import os; os.getpid()")
    out = Recorder()
    run = pool.start_run(
        "import os, time\nprint('on', flush=True)\nif os.environ['RANK'] == '1': time.sleep(60)", out=out
    )
    assert out.started.wait(PATIENCE)
    os.kill(pids[1], signal.SIGKILL)  # type: ignore[arg-type]  # a process id
    results = run.wait(PATIENCE)
    assert results.deaths[1].reason == "killed by SIGKILL"
    assert pool.lost == {1: "killed by SIGKILL"}
    assert pool.ranks == (0, 2)
    told = pool.client.wait_for(
        lambda world: any("SIGKILL" in death.reason for death in world.deaths), PATIENCE
    )
    assert [death.rank for death in told.deaths] == [1]
    with pytest.raises(InvalidRequestError, match="rank 1 is lost"):
        pool.run("1", ranks=[1])

    assert pool.repair() == (1,)
    assert values(pool, "globals().get('kept')") == ["still here", None, "still here"]
    assert pool.lost == {}
    assert pool.repair() == ()


LOSES_A_RANK_BETWEEN_COLLECTIVES = """
import os, signal, time
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives.errors import AbortedError
hvd.init()
for _ in range(5):  # later ones take the shortest way
    hvd.allreduce(np.ones({count}, np.float32), name="x", op=hvd.Sum)
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.size() == 3:
    time.sleep(0.01)
raised = []
for _ in range(2):
    try:
        total = float(hvd.allreduce(np.ones({count}, np.float32), name="x", op=hvd.Sum)[0])
    except AbortedError as error:
        raised.append(str(error))
"""


@pytest.mark.parametrize("count", [1, 100_000, 1_000_000], ids=["on the board", "on the plane", "large"])
def test_the_next_collective_raises_the_death_of_a_rank_if_none_was_under_way(
    start_pool: StartPool, count: int
) -> None:
    pool = start_pool(3)
    results = pool.run(LOSES_A_RANK_BETWEEN_COLLECTIVES.format(count=count))
    assert results.deaths.keys() == {1}
    assert values(pool, "total") == [2.0, 2.0]
    assert values(pool, "len(raised)") == [1, 1]
    assert values(pool, "'rank 1 died: ' in raised[0]") == [True, True]
    assert values(pool, "float(hvd.allreduce(np.ones(1), name='next', op=hvd.Sum)[0])") == [2.0, 2.0]


def test_repair_waits_for_the_end_of_a_rank_whose_connection_is_gone(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pids = {status.rank: status.pid for status in pool.status()}
    warm = psutil.Process(pids[1]).parent()
    assert warm is not None
    warm.suspend()  # no watcher reports the end of the process
    os.kill(pids[1], signal.SIGKILL)
    pool.client.wait_for(lambda membership: 1 not in membership.ranks, timeout=PATIENCE)
    awake = threading.Timer(0.3, warm.resume)
    awake.start()
    try:
        assert pool.repair() == (1,)
    finally:
        awake.join()
    assert pool.ranks == (0, 1)
    assert pool.status()[0].pid == pids[0]


def test_reasons_of_deaths_are_told_in_words(start_pool: StartPool) -> None:
    pool = start_pool(3)
    run = pool.run(
        "import os, ctypes\nrank = os.environ['RANK']\n"
        "if rank == '0': os._exit(3)\nif rank == '1': ctypes.string_at(0)\nif rank == '2': os.abort()"
    )
    assert {rank: death.reason for rank, death in run.deaths.items()} == {
        0: "exit code 3",
        1: "segmentation fault",
        2: "abort() was called",
    }
    assert "Segmentation fault" in pool.last_words(1)


def test_restart_replaces_a_rank_that_hangs_in_foreign_code(start_pool: StartPool, tmp_path: Path) -> None:
    pool = start_pool(2)
    pool.run("kept = 1")
    hangs = tmp_path / "hangs"
    os.mkfifo(hangs)
    # PyDLL keeps the interpreter's lock, so that nothing of Python's runs in that process any more: no output would be sent.
    run = pool.start_run(
        f"import ctypes\nopen({str(hangs)!r}, 'w').close(); ctypes.PyDLL(None).sleep(60)", ranks=[1]
    )
    hangs.read_text()
    pool.restart([1])
    assert run.wait(GONE).deaths[1].reason == "ended by a restart"
    assert values(pool, "globals().get('kept')") == [1, None]


def test_interrupt_ends_the_cell_and_keeps_the_ranks(start_pool: StartPool) -> None:
    pool = start_pool(2)
    out = Recorder()
    run = pool.start_run("kept = 7\nprint('on', flush=True)\nwhile True: pass", out=out)
    out.wait_for("on", (0, 1))
    run.interrupt()
    results = run.wait(PATIENCE)
    assert {error.ename for error in results.errors.values()} == {"KeyboardInterrupt"}
    assert values(pool, "kept") == [7, 7]


def test_ranks_ignore_ctrl_c_of_the_terminal_and_are_not_in_its_session(start_pool: StartPool) -> None:
    pool = start_pool(2)
    for pid in values(pool, "import os; os.getpid()"):
        assert isinstance(pid, int)
        assert os.getsid(pid) == pid
        os.kill(pid, signal.SIGINT)
    assert values(pool, "1") == [1, 1]
    assert pool.lost == {}


def test_variables_go_both_ways(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pool.push(a=[1, 2], b="x")
    assert pool.pull("a + [b]") == {0: [1, 2, "x"], 1: [1, 2, "x"]}
    assert pool.pull("a", [1]) == {1: [1, 2]}
    with pytest.raises(LookupError, match="nothing"):
        pool.pull("nothing")
    with pytest.raises(HvdlabError, match="lock"):
        pool.push(lock=threading.Lock())


def test_status_comes_while_a_rank_is_busy(start_pool: StartPool) -> None:
    pool = start_pool(2)
    out = Recorder()
    run = pool.start_run("print('on', flush=True)\nwhile True: pass", ranks=[1], out=out)
    assert out.started.wait(PATIENCE)
    assert pool.state == "running"
    idle, busy = pool.status()
    assert (idle.rank, idle.state, busy.rank, busy.state) == (0, "idle", 1, "running")
    assert busy.pid == psutil.Process(busy.pid).pid
    assert busy.pss > 0
    run.interrupt()
    run.wait(PATIENCE)


def test_a_prewarmed_pool_starts_from_what_is_there(start_pool: StartPool) -> None:
    warm = Prestart.begin()
    pool = start_pool(2, warm=warm)
    assert values(pool, "1") == [1, 1]
    warm.close()  # taken: nothing happens
    assert values(pool, "1") == [1, 1]


def test_a_prewarmed_pool_that_is_not_used_leaves_nothing() -> None:
    Prestart.begin().close()


def wait_subscribed(client: Any) -> None:
    """Wait until a client of ipyparallel gets what engines print.

    It subscribes at its start, and loses output that is printed before the subscription has arrived: a call with ``block=True`` would wait for it
    for ever.
    """

    def hears() -> bool:
        printed = client[:].execute("print('?')")
        printed.get(timeout=PATIENCE)
        return bool(printed.wait_for_output(1))

    eventually(hears)


def test_it_is_a_cluster_of_ipyparallel(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pool.run("mine = int(__import__('os').environ['RANK'])")
    cluster = pool.cluster
    saved = json.loads(Path(cluster.cluster_file).read_text())
    assert saved["cluster"]["cluster_id"] == cluster.cluster_id
    client = cluster.connect_client_sync()
    try:
        client.wait_for_engines(2, timeout=PATIENCE)
        assert client.ids == [0, 1]
        assert client[:].pull("mine", block=True) == [0, 1]
        client[:].push({"theirs": 5}, block=True)
        assert values(pool, "theirs + mine") == [5, 6]
        wait_subscribed(client)
        printed = client[:].execute("print('through ipyparallel', mine)", block=True)
        assert printed.stdout == ["through ipyparallel 0\n", "through ipyparallel 1\n"]
        pool.resize(1)
        eventually(lambda: client.ids == [0])
        pool.resize(2)
        eventually(lambda: client.ids == [0, 1])
    finally:
        client.close()
        zmq.Context.instance().destroy(linger=0)


def test_a_pool_that_is_used_by_cells_alone_has_no_controller(start_pool: StartPool) -> None:
    """It would listen on 16 ports, and take memory."""
    pool = start_pool(2)
    pool.run("1")
    warm = PoolProbe(pool).fork_server
    assert set(warm.children()) == {0, 1}
    assert PoolProbe(pool).companion._cluster is None
    ranks = [psutil.Process(pid) for pid in PoolProbe(pool).group.pids().values()]
    assert [one.net_connections("inet") for one in (*ranks, psutil.Process(warm.pid))] == [[], [], []]


def test_what_ipyparallel_publishes_is_for_who_has_the_key(start_pool: StartPool) -> None:
    """The port is open to all users of the host; ZeroMQ sends them nothing, and takes nothing from them."""
    pool = start_pool(1)
    client = pool.cluster.connect_client_sync()
    try:
        client.wait_for_engines(1, timeout=PATIENCE)
        wait_subscribed(client)
        files = pool.cluster.profile_dir, pool.cluster.cluster_id
        (told,) = Path(files[0], "security").glob(f"ipcontroller-{files[1]}-client.json")
        port = json.loads(told.read_text())["iopub"]
        wrong, _ = zmq.curve_keypair()
        context = zmq.Context()
        for server in (None, wrong):
            with context.socket(zmq.SUB) as stranger:
                if server is not None:
                    stranger.curve_serverkey = server
                    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                monitor = stranger.get_monitor_socket()
                stranger.setsockopt(zmq.SUBSCRIBE, b"")
                stranger.connect(f"tcp://127.0.0.1:{port}")
                assert how_it_ends(monitor) != zmq.EVENT_HANDSHAKE_SUCCEEDED
                client[:].execute("print('secret')", block=True)
                assert stranger.poll(0) == 0
                stranger.disable_monitor()
                monitor.close(linger=0)
        context.destroy(linger=0)
    finally:
        client.close()
        zmq.Context.instance().destroy(linger=0)


def how_it_ends(monitor: zmq.Socket[bytes]) -> int:
    """Return the event that ends a connection's handshake."""
    ends = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_DISCONNECTED,
    )
    while monitor.poll(int(PATIENCE * 1000)):
        event = int(recv_monitor_message(monitor)["event"])
        if event in ends:
            return event
    raise AssertionError("the handshake does not end")


def test_other_processes_find_it_with_ipyparallel_s_tools(start_pool: StartPool) -> None:
    pool = start_pool(2)
    source = (
        "import sys, ipyparallel\n"
        "cluster = ipyparallel.Cluster.from_file(sys.argv[1])\n"
        "client = cluster.connect_client_sync()\n"
        "client.wait_for_engines(2, timeout=60)\n"
        "print(client[:].apply_sync(lambda: 42))\n"
        "cluster.stop_engines_sync()"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, pool.cluster.cluster_file], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[42, 42]\n", done.stderr
    eventually(lambda: pool.lost == dict.fromkeys((0, 1), "killed by SIGTERM"))


def test_what_was_imported_ahead_is_not_the_same_random_state(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_PRELOAD", "numpy,random")
    found = values(start_pool(3), "import numpy, random\n(float(numpy.random.rand()), random.random())")
    assert len({pair[0] for pair in found}) == 3  # type: ignore[index]  # pairs
    assert len({pair[1] for pair in found}) == 3  # type: ignore[index]  # pairs


def test_torch_is_there_without_an_import_s_cost(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    pool = start_pool(2)
    assert values(pool, "import sys; 'torch' in sys.modules") == [True, True]
    assert values(pool, "import os; os.environ['TF_CPP_MIN_LOG_LEVEL']") == ["1", "1"]
    assert (
        values(pool, "import torch; (torch.ones(2, 3).sum().item(), torch.get_num_threads())")
        == [(6.0, 3)] * 2
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"np": 0}, "at least one rank"),
        ({"np": -2}, "at least one rank"),
        ({"np": 2.5}, "whole number"),
        ({"np": 10**7}, "65535 ranks at most"),
        ({"np": 60_000}, "choose at most"),
        ({"np": 2, "launcher": "locla"}, "choose one of local, mpi"),
        ({"np": 2, "plane": "carrier-pigeon"}, "choose one of auto"),
        ({"np": 2, "hosts": "a:4"}, "launcher"),
    ],
)
def test_impossible_wishes_are_refused_in_one_sentence(
    start_pool: StartPool, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        start_pool(**arguments)
    assert "\n" not in str(raised.value)
    assert len(start_pool(1).ranks) == 1


def test_a_module_that_can_not_be_imported_is_named_with_its_error(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_torch.py").write_text(
        "raise ImportError('libcudart.so.99: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "broken_torch")
    with pytest.raises(StartError, match=r"import broken_torch.*libcudart\.so\.99.*HVDLAB_PRELOAD"):
        start_pool(2)
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    assert values(start_pool(2), "1") == [1, 1]


def test_a_launcher_whose_program_is_missing_is_told_before_anything_starts(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for launcher, said in (("slurm", "Slurm's commands, and `sbatch`"), ("pbs", "`qsub`,")):
        with pytest.raises(StartError, match=rf"launcher `{launcher}` needs {said} .*is not on the PATH"):
            start_pool(2, launcher=launcher)
    assert not list(tmp_path.iterdir()), "no batch script is left behind"


def test_a_module_that_crashes_the_import_is_told(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "crashing.py").write_text("import os, sys\nprint('about to go', file=sys.stderr)\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "crashing")
    with pytest.raises(StartError, match=r"(?s)abort\(\) was called.*about to go"):
        start_pool(2)


def test_a_failed_growth_leaves_the_pool_as_it_was(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start_pool(2)
    pool.run("kept = 1")
    monkeypatch.setenv("HVDLAB_START_TIMEOUT", "not a number")
    with pytest.raises(
        StartError, match=r"(?s)rank.*could not be started: exit code 1.*HVDLAB_START_TIMEOUT"
    ):
        pool.resize(3)
    assert pool.ranks == (0, 1)
    monkeypatch.delenv("HVDLAB_START_TIMEOUT")
    pool.resize(3)
    assert values(pool, "globals().get('kept')") == [1, 1, None]


def test_a_stopped_pool_says_so(start_pool: StartPool) -> None:
    pool = start_pool(1)
    pool.stop()
    pool.stop()
    assert pool.state == "stopped"
    assert pool.ranks == ()
    with pytest.raises(InvalidRequestError, match="stopped"):
        pool.run("1")


def test_stopping_ends_a_run_in_the_background(start_pool: StartPool) -> None:
    pool = start_pool(2)
    out = Recorder()
    run = pool.start_run("print('on', flush=True)\nwhile True: pass", out=out)
    assert out.started.wait(PATIENCE)
    pool.stop()
    assert set(run.wait(GONE).deaths) == {0, 1}


def test_what_ranks_leave_running_ends_with_them(start_pool: StartPool) -> None:
    pool = start_pool(1)
    (pid,) = values(pool, "import subprocess\nsubprocess.Popen(['sleep', '600']).pid")
    (far,) = values(pool, "subprocess.Popen(['sleep', '600'], start_new_session=True).pid")
    pool.stop()
    eventually(lambda: not psutil.pid_exists(pid) and not psutil.pid_exists(far))  # type: ignore[arg-type]


def test_python_is_this_one(start_pool: StartPool) -> None:
    assert values(start_pool(1), "import sys; sys.executable") == [sys.executable]


def test_a_rank_starts_no_pool(start_pool: StartPool) -> None:
    pool = start_pool(1)
    tried = pool.run(
        "import hvdlab\ntry: hvdlab.Pool.start(2)\nexcept Exception as error: said = str(error)\nsaid"
    )
    assert tried[0].startswith("this is a rank, and each rank would start a pool of its own; run the cell")
    nested = pool.run("%load_ext hvdlab\n%hvd_pool start -np 2")
    assert nested.errors[0].ename == "UsageError"
    assert nested.errors[0].evalue.startswith("this is a rank, and each rank would start a pool of its own")

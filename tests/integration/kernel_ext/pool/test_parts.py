"""The small parts of a pool, each by itself."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import WorldEnvironment, rank_environment
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM
from hvdlab.kernel_ext.notebook import assembly
from hvdlab.kernel_ext.notebook.ipyparallel import launchers
from hvdlab.kernel_ext.notebook.ipyparallel.launchers import EngineSetLauncher, EngineSetStarter, PoolRequest
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.rank.__main__ import foreign_sizes
from hvdlab.kernel_ext.wire.codec import decode_to_rank
from hvdlab.kernel_ext.wire.status import RankStatus, Status
from hvdlab.kernel_ext.wire.values import Acked, PullValue, PushValue
from hvdlab.launch import local
from hvdlab.launch.forkserver.messages import (
    Exited,
    Fork,
    Loaded,
    decode_from_server,
    decode_to_server,
    encode,
)
from hvdlab.launch.forkserver.program import load, modules_to_load
from hvdlab.launch.host_agent.connection import remote_command
from hvdlab.launch.hosts import Host, parse_hosts
from hvdlab.launch.local import check_loaded, check_resources
from hvdlab.launch.options import parse
from hvdlab.launch.processes import OutOfMemoryCounter, describe
from support.patience import PATIENCE
from support.threads import asleep

WORLD = WorldEnvironment("unix:/run/coordinator", "secret", master_port=2345)


# -- environment ------------------------------------------------------------------------------------------------------


def test_a_rank_s_environment_tells_every_library_where_it_stands() -> None:
    found = rank_environment({"HOME": "/home/me", "RANK": "stale"}, WORLD, 3, 4)
    assert found["HOME"] == "/home/me"
    assert [found[n] for n in ("RANK", "LOCAL_RANK", "HOROVOD_RANK", "HVDLAB_RANK")] == ["3"] * 4
    assert [found[n] for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE")] == ["4"] * 3
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "2345")
    assert found["HVDLAB_COORDINATOR"] == "unix:/run/coordinator"


def test_threads_are_shared_out_unless_the_user_has_done_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert rank_environment({}, WORLD, 0, 4)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({}, WORLD, 0, 64)["OMP_NUM_THREADS"] == "1"
    assert rank_environment({"OMP_NUM_THREADS": "9"}, WORLD, 0, 4)["OMP_NUM_THREADS"] == "9"
    tensorflow = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    for base, expected in (
        ({}, ("4", "4")),
        ({"OMP_NUM_THREADS": "1"}, ("1", "2")),
        ({"OMP_NUM_THREADS": "4,2"}, ("4,2", "2")),
        ({"TF_NUM_INTRAOP_THREADS": "7", "TF_NUM_INTEROP_THREADS": "1"}, ("7", "1")),
    ):
        found = rank_environment(base, WORLD, 0, 4)
        assert tuple(found[name] for name in tensorflow) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        {
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "2",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        },
    ],
    ids=["mpich", "openmpi", "slurm"],
)
def test_foreign_launchers_are_understood(environ: dict[str, str]) -> None:
    found = foreign_sizes(environ)
    assert (found["HVDLAB_RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (
        ("2", "4", "0", "2")
    )


def test_without_a_launcher_nothing_is_made_up() -> None:
    assert foreign_sizes({"HOME": "/"}) == {}


# -- checks -----------------------------------------------------------------------------------------------------------


def test_room_is_counted_for_new_ranks_only() -> None:
    check_resources(100, already=90, available=10 * local.BYTES_PER_RANK)
    with pytest.raises(InvalidRequestError, match="choose at most 99"):
        check_resources(100, already=90, available=9 * local.BYTES_PER_RANK)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (40, "enough for no ranks; start the notebook where `ulimit -Hn` is at least"),
        (400, "choose at most "),
    ],
)
def test_too_few_open_files_are_told_with_the_remedy(
    limit: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        check_resources(500, available=1 << 62)


@pytest.mark.parametrize("np", [0, -1, True, 1.5, "4", None, 1 << 16])
def test_odd_sizes_are_refused(np: Any) -> None:
    with pytest.raises(InvalidRequestError, match=str(np)):
        assembly.check_size(np)


# -- exits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "signal", "oom", "words"),
    [
        (3, 0, False, "exit code 3"),
        (-1, 9, False, "killed by SIGKILL"),
        (-1, 11, False, "segmentation fault"),
        (-1, 64, False, "killed by SIGRTMAX"),
        (-1, 99, False, "killed by signal 99"),
        (-1, 9, True, "out of memory, killed by the kernel"),
    ],
)
def test_exits_in_words(code: int, signal: int, oom: bool, words: str) -> None:
    assert describe(Exited(0, 1, code, signal, 2 << 30, oom)) == words


@pytest.mark.parametrize(
    ("cgroup", "path"),
    [
        ("0::/job\n", "sys/fs/cgroup/job/memory.events"),
        ("0::/job\n", "sys/fs/cgroup/memory.events"),
        ("4:memory:/job\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control"),
        ("", "proc/vmstat"),
    ],
)
def test_out_of_memory_kills_are_counted_where_they_can_be_read(
    tmp_path: Path, cgroup: str, path: str
) -> None:
    counter_file = tmp_path / path
    for file, text in ((tmp_path / "proc/self/cgroup", cgroup), (counter_file, "low 5\noom_kill 1\n")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    counter = OutOfMemoryCounter(tmp_path)
    assert not counter.increased()
    counter_file.write_text("low 5\noom_kill 2\n")
    assert counter.increased()
    assert not counter.increased()


def test_unreadable_out_of_memory_count_makes_no_old_kill_new(tmp_path: Path) -> None:
    counter_file = tmp_path / "proc/vmstat"
    counter_file.mkdir(parents=True)  # a read of a directory fails, as one without a free descriptor
    counter = OutOfMemoryCounter(tmp_path)
    assert not counter.increased()
    counter_file.rmdir()
    counter_file.write_text("oom_kill 3\n")
    assert not counter.increased()
    counter_file.unlink()
    assert not counter.increased()
    counter_file.write_text("oom_kill 3\n")
    assert not counter.increased()
    counter_file.write_text("oom_kill 4\n")
    assert counter.increased()


# -- the fork server's messages and imports --------------------------------------------------------------------------


def test_messages_survive_the_wire() -> None:
    order = Fork.of(1, {"A": "b"}, "/tmp", ("", "/lib"), ("--x",))
    assert decode_to_server(encode(order)[4:]) == order
    exited = Exited(1, 2, -1, 9, 3, True, "tail")
    assert decode_from_server(encode(exited)[4:]) == exited


def test_the_user_chooses_what_is_imported_ahead() -> None:
    assert modules_to_load(PROGRAM, {"HVDLAB_PRELOAD": ""}) == ()
    assert modules_to_load(PROGRAM, {"HVDLAB_PRELOAD": "a, b.c"}) == ("a", "b.c")
    assert "numpy" in modules_to_load(PROGRAM, {})


def test_imports_that_fail_are_told_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load(PROGRAM, ["json", "leaving", "no_such_module"])
    assert "json" in loaded.modules
    assert set(loaded.failed) == {"leaving", "no_such_module"}
    with pytest.raises(StartError, match=r"import leaving.*no licence.*HVDLAB_PRELOAD='json'"):
        check_loaded(loaded)
    check_loaded(Loaded(("json",), {}, 0.1))


# -- questions --------------------------------------------------------------------------------------------------------


class Ranks:
    """Answer on a thread of their own, as the client does."""

    def __init__(self, silent: Sequence[int] = (), dying: Sequence[int] = ()) -> None:
        self.silent, self.dying = silent, dying
        self.questions = RankRequests(self)
        self.threads: list[threading.Thread] = []

    def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None:
        asked = decode_to_rank(body)
        assert isinstance(asked, PushValue | PullValue)

        def answer() -> None:
            for rank in ranks:
                if rank in self.dying:
                    self.questions.rank_died(rank)
                elif rank not in self.silent:
                    self.questions.resolve(rank, Acked(asked.ticket))

        self.threads.append(threading.Thread(target=answer))
        self.threads[-1].start()


def test_answers_are_gathered_by_rank() -> None:
    found = Ranks().questions.ask(lambda ticket: PushValue(ticket, (), ()), [0, 2], Deadline(PATIENCE))
    assert set(found) == {0, 2}


def test_a_rank_that_dies_is_not_waited_for() -> None:
    found = Ranks(dying=[2]).questions.ask(lambda t: PushValue(t, (), ()), [0, 2], Deadline(None))
    assert set(found) == {0}


def test_a_silent_rank_is_waited_for_until_the_deadline() -> None:
    found = Ranks(silent=[2]).questions.ask(lambda t: PushValue(t, (), ()), [0, 2], Deadline(0.05))
    assert set(found) == {0}


def test_interrupt_that_another_thread_receives_ends_the_wait_for_answers() -> None:
    """As one that comes between Python's last look for signals and the beginning of the wait."""
    waits = threading.get_native_id()

    def press_ctrl_c() -> None:
        asleep(waits)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    ranks = Ranks(silent=[0])
    pressing = threading.Thread(target=press_ctrl_c)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.questions.ask(lambda t: PushValue(t, (), ()), [0], Deadline(None))
    pressing.join()


def test_late_answers_concern_nobody() -> None:
    Ranks().questions.resolve(0, Status(9, "", "", 0, 0, 0.0, 0, "", ""))


# -- launchers --------------------------------------------------------------------------------------------------------


def test_a_missing_mpiexec_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match="pip install mpich"):
        launchers.find("MPI").check(2, "")


@pytest.mark.parametrize("hosts", ["", ":4", "a:x", ",,"])
def test_hosts_that_can_not_be_read_are_refused(hosts: str) -> None:
    with pytest.raises(InvalidRequestError, match="a:4,b:4"):
        parse_hosts(hosts)


def test_hosts_are_read() -> None:
    assert parse_hosts("a:4, b,a:1") == [Host("a", 5), Host("b", 1)]


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "-E", "-F:2", ".a", "a b"])
def test_no_name_of_a_host_is_an_option_of_ssh(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="host"):
        parse_hosts(name)
    with pytest.raises(InvalidRequestError, match="host"):
        Host(name, 1)


def test_ssh_is_told_where_its_options_end() -> None:
    assert remote_command(("/usr/bin/ssh", "-p", "2222"), "a", ["x"]) == [
        "/usr/bin/ssh",
        "-p",
        "2222",
        "--",
        "a",
        "x",
    ]
    assert remote_command(("mine",), "a", ["x"]) == ["mine", "a", "x"]


class FakeClient:
    """Client of a coordinator that is never asked."""

    def on_membership(self, callback: object) -> None:
        """Do nothing."""


def test_ipyparallel_s_launchers_start_our_ranks(tmp_path: Path) -> None:
    """As far as the command line goes: there is no cluster here to run it on."""
    from ipyparallel import Cluster  # type: ignore[import-untyped]  # has no types

    far = WorldEnvironment("tls:10.0.0.1:4000", "secret", "PEM")
    options = parse("slurm", EngineSetLauncher("slurm").options(), {"python": "/opt/python"})
    request = PoolRequest(far, FakeClient(), module="hvdlab.kernel_ext.rank", options=options)  # type: ignore[arg-type]  # not used here
    ranks = EngineSetStarter("slurm", request, Any, Any)  # type: ignore[arg-type]  # not used here
    traits = ranks.traits(4)

    async def make() -> Any:
        cluster = Cluster(
            engine_launcher_class=launchers.engine_set_class("slurm"),
            profile_dir=str(tmp_path),
            load_profile=False,
            parent=None,
        )
        return cluster.engine_launcher_class(
            work_dir=".", parent=cluster, profile_dir=str(tmp_path), **traits
        )

    launcher = asyncio.run(make())
    assert " ".join(launcher.engine_cmd).endswith("/opt/python -m hvdlab.kernel_ext.rank")
    environment = launcher.get_env()
    assert environment["HVDLAB_COORDINATOR"] == "tls:10.0.0.1:4000"
    assert environment["HVDLAB_CERT"] == "PEM"


def test_traits_of_a_batch_system_are_options() -> None:
    given = {"queue": "gpu", "timelimit": "2:00:00"}
    options = parse("slurm", EngineSetLauncher("slurm").options(), given)
    request = PoolRequest(WORLD, FakeClient(), module="hvdlab.kernel_ext.rank", options=options)  # type: ignore[arg-type]  # not used here
    traits = EngineSetStarter("slurm", request, Any, Any).traits(2)  # type: ignore[arg-type]  # not used here
    assert (traits["queue"], traits["timelimit"]) == ("gpu", "2:00:00")
    assert traits["engine_cmd"] == ["python3", "-m", "hvdlab.kernel_ext.rank"]
    with pytest.raises(
        InvalidRequestError, match=r"`slurm` has no option `partitions`; it takes `python`, .*`queue`"
    ):
        parse("slurm", EngineSetLauncher("slurm").options(), {"partitions": "gpu"})


def test_the_text_of_a_status_leaves_out_what_is_not_there() -> None:
    assert repr(RankStatus(3, state="starting")) == "RankStatus(rank=3, state='starting')"
    assert repr(RankStatus(0, "h", 7, state="idle")) == "RankStatus(rank=0, host='h', pid=7, state='idle')"

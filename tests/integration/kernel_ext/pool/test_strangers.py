"""All that listens and lies about while a pool trains is in the documentation's tables; strangers and other users get nothing of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chaos import census
from chaos.strangers import visit
from hvdlab.kernel_ext.notebook.pool import Pool
from support import ordinary_user
from support.network.listening import Listener, listeners
from support.patience import PATIENCE
from support.pool_recorder import Recorder

pytest.importorskip("torch")  # brings the plane that listens

StartPool = Callable[..., Pool]

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "security.md").read_text()

# Each rank claims to be a host of its own: the others reach its parameter server by the port for other hosts.
BEGIN = """
import os, numpy as np, hvdlab.numpy as hvd
from hvdlab import kvstore
hvd.init()
os.environ["HVDLAB_HOST"] = f"host{hvd.rank()}"
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(3))
kv.barrier()
memory = "kept"
"""
TRAIN = """
steps, total, out = 0, 0.0, np.zeros(3)
print("training", flush=True)
while not hvd.allreduce(np.array([float(os.path.exists(STOP))]), name="stop", op=hvd.Sum)[0]:
    total += float(hvd.allreduce(np.ones(1000), name="gradient", op=hvd.Sum).sum())
    kv.push("w", np.ones(3))
    steps += 1
kv.pull("w", out=out)  # its own pushes are there now, and behind the barrier those of the others
kv.barrier()
kv.pull("w", out=out)
memory, steps, total, float(out[0])
"""


def names(heading: str) -> set[str]:
    """Return the first column of a table of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip() for line in lines[1:]}


@dataclass
class Training:
    """Pool with all that may be open beside it, which trains until :meth:`end`.

    Attributes:
        others: Listeners of the test's own process that were there before the pool, such as another module's store.
    """

    pool: Pool
    mark: str
    directory: Path
    stop: Path
    others: frozenset[Listener]
    run: Any = None

    def begin(self) -> None:
        out = Recorder()
        self.run = self.pool.start_run(TRAIN.replace("STOP", repr(str(self.stop))), out=out)
        out.wait_for("training", [0, 1])

    def end(self) -> list[Any]:
        """Return each rank's results; fail if anything was lost."""
        self.stop.touch()
        results = self.run.wait(PATIENCE)
        assert results.ok, results.errors
        found = list(results)
        for memory, steps, total, pushed in found:
            assert memory == "kept"
            assert steps > 0
            assert total == steps * 2000
            assert pushed == sum(steps for _, steps, _, _ in found)
        return found

    def processes(self) -> dict[int, str]:
        return census.marked(self.mark)

    def listeners(self) -> set[Listener]:
        return listeners([os.getpid(), *self.processes()]) - self.others

    def ports(self) -> list[int]:
        """Return TCP ports on the loopback interface."""
        places = [one.place for one in self.listeners() if not one.place.startswith("unix:")]
        assert {place.rpartition(":")[0] for place in places} == {"127.0.0.1"}
        return sorted({int(place.rpartition(":")[2]) for place in places})


@pytest.fixture
def training(start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Training]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(census.MARK, mark)
    directory = Path(tempfile.mkdtemp())
    # Others can pass through: the barrier must be hvdlab's own.
    for one in (directory, directory.parent):
        one.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("IPYTHONDIR", str(directory / "ipython"))
    there = frozenset(listeners([os.getpid()]))
    pool = start_pool(2, plane="gloo", keep="strange", timeout=120)
    assert pool.run(BEGIN).errors == {}
    assert pool.cluster is not None
    found = Training(pool, mark, directory, tmp_path / "stop", there)
    yield found
    for child in (directory / "ipython").rglob("*"):
        if child.is_file():
            child.unlink()
    pool.stop()
    shutil.rmtree(directory)


def row_of(training: Training, listener: Listener, processes: dict[int, str]) -> str:
    """Return the table's name of the listener there."""
    place, process = listener.place, processes.get(listener.pid, "")
    if place.startswith("unix:"):
        path = Path(place.removeprefix("unix:"))
        for directory in (path.parent, path.parent.parent)[: 1 + (path.name == "socket")]:
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        return {
            "coordinator": "coordinator",
            "handover": "coordinator of a kept pool, handing over",
            "warm": "fork server of a kept pool",
            "socket": "parameter server",
        }[path.name]
    return {
        "hvd-controller": "ipyparallel's controller",
        "hvdlab-server": "parameter server, for other hosts",
        "hvd-rank-0": "Gloo",
        "hvd-rank-1": "Gloo",
    }[process]


ELSEWHERE = {
    "coordinator, for other hosts",
    "MPI",
    "PyTorch's store at `MASTER_PORT`",
}
"""What is not opened for ranks of one host that `Pool` starts."""


@pytest.mark.timeout(300)
def test_the_table_of_ports_and_the_sockets_are_the_same(training: Training) -> None:
    processes = training.processes()
    rows = [row_of(training, one, processes) for one in training.listeners()]
    assert set(rows) == names("Ports") - ELSEWHERE
    (said,) = re.findall(r"ipyparallel's controller \| TCP, (\d+) ports of the loopback interface", PAGE)
    assert rows.count("ipyparallel's controller") == int(said)
    training.begin()
    assert {row_of(training, one, processes) for one in training.listeners()} == set(rows)
    training.end()


@pytest.mark.timeout(300)
def test_strangers_at_every_port_stop_nothing_and_nothing_is_lost(training: Training) -> None:
    """Web pages and floods, also within TLS: at all of the ports while the ranks train."""
    before = training.processes()
    training.begin()
    ports = training.ports()
    assert len(ports) >= 19
    with contextlib.ExitStack() as strangers:
        for port in ports:
            visit(strangers, port)
        training.end()
    assert training.processes().keys() >= before.keys(), "a process has ended"
    assert list(training.pool.run("memory")) == ["kept", "kept"]


def tried(pids: list[int], sockets: list[str], files: list[str], ports: list[int]) -> list[str]:
    """Return the addresses of these that another user reaches; run as one."""
    reached = []
    for pid in pids:
        for name in ("environ", "mem", "maps", "fd/1"):
            # A refusal is right: only successes are collected.
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
                file.read(1)
                reached.append(file.name)
        with contextlib.suppress(PermissionError):
            os.kill(pid, signal.SIGCONT)
            reached.append(f"signal to {pid}")
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.connect(path)
            reached.append(path)
    for path in files:
        for mode in ("rb", "ab"):
            with contextlib.suppress(OSError), open(path, mode):
                reached.append(path)
        with contextlib.suppress(OSError):
            os.symlink("/etc/passwd", f"{path}.squatted")
            reached.append(f"{path}.squatted")
    with contextlib.ExitStack() as strangers:
        for port in ports:
            visit(strangers, port)
    return reached


@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_reaches_no_process_socket_or_file_while_a_pool_trains(training: Training) -> None:
    training.begin()
    sockets = [one.place.removeprefix("unix:") for one in training.listeners() if "unix:" in one.place]
    directories = {training.directory, *(Path(path).parent for path in sockets)}
    files = {str(path) for one in directories for path in one.rglob("*") if private(path)}
    assert len(sockets) >= 4
    # One of each of the table: a kept pool, a parameter server's settings, keys of ipyparallel.
    for part in ("strange.json", "launch.json", "-curve.json", "-client.json"):
        assert any(part in name for name in files), part
    pids = list(training.processes())
    control = training.directory / "for-all"
    control.write_text("what another user may read")
    control.chmod(0o644)
    files.add(str(control))
    assert ordinary_user.run(tried, pids, sockets, sorted(files), training.ports()) == [str(control)]
    training.end()


def private(path: Path) -> bool:
    """Whether it is a file in one of the table's places, or a socket."""
    parts = path.parts
    return path.is_file() and ("security" in parts or any(part.startswith("hvdlab-") for part in parts))


@pytest.mark.timeout(300)
def test_the_table_of_files_and_the_modes_are_the_same(training: Training) -> None:
    """Directories are for their user only, and so is each file in them that has a secret."""
    coordinator = next(
        Path(one.place.removeprefix("unix:")).parent
        for one in training.listeners()
        if one.place.endswith("coordinator")
    )
    places = [coordinator, *(one for one in coordinator.iterdir() if one.is_dir())]
    places += [
        training.directory / f"hvdlab-{os.getuid()}",
        training.directory / f"hvdlab-{os.getuid()}/pools",
    ]
    places.append(training.directory / "ipython/profile_default/security")
    secrets = set()
    for place in places:
        assert stat.S_IMODE(place.stat().st_mode) == 0o700, place
        for file in place.iterdir():
            if file.is_file() and stat.S_IMODE(file.stat().st_mode) != 0o600:
                assert file.name.startswith("cluster-"), file  # which holds names of the others, and no key
            secrets.add(re.sub(r"[0-9a-z_-]*-(?=(client|curve|engine)\.json)|\d", "", file.name))
    assert {"launch.json", "strange.json", "curve.json", "client.json", "engine.json"} <= secrets
    for said in ("coordinator's socket", "kept pools", "CurveZMQ keys", "a parameter server's socket"):
        assert any(said in name for name in names("Files")), said

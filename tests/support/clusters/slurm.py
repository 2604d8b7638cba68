"""A real Slurm of two nodes on this machine, from Debian's packages, which are unpacked and not installed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from hvdlab.collectives.settings import free_port
from support.clusters.debian_packages import Unavailable, libraries, unpacked
from support.patience import PATIENCE, eventually

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "libhwloc15",
    "liblua5.1-0",
    "libmunge2",
)
"""Slurm, and what it needs beside a base system."""

CACHE = Path(__file__).parents[3] / "out/engines/slurm"
"""Where the packages are kept."""

NODES, CPUS = ("n1", "n2"), 4
"""The nodes, and how many processors each claims to have, whatever the machine has."""

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
CryptoType=crypto/none
CommunicationParameters=NoAddrCache
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=1
InactiveLimit=0
OverTimeLimit=0
PluginDir={plugins}
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/%n.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/%n.log
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=n1,n2 MaxTime=INFINITE State=UP AllowAccounts=nobody
PartitionName=short Nodes=n1,n2 MaxTime=1 State=UP
"""


class SlurmCluster:
    """slurmctld and a slurmd for each node, until the end of a ``with`` block.

    Args:
        root: Where the packages were unpacked.
        work: A directory for Slurm's files.

    Attributes:
        work: As given.
        environment: Variables by which Slurm's commands find the cluster, and a shell finds them.
    """

    def __init__(self, root: Path, work: Path) -> None:
        if os.geteuid() != 0:
            raise Unavailable("Slurm's daemons run as root here")
        self._root, self.work = root, work
        plugins = libraries(root) / "slurm-wlm"
        self.environment = {
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries(root)}:{plugins}",
            "SLURM_CONF": str(work / "slurm.conf"),
        }
        control, *ports = (free_port() for _ in range(1 + len(NODES)))
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        text = CONFIGURATION.format(host=host, control=control, plugins=plugins, work=work, nodes=nodes)
        (work / "state").mkdir(parents=True)
        (work / "slurm.conf").write_text(text)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def made(cls, work: Path) -> Self:
        """Return a cluster of the packages in the cache, after they were brought if need be. Raises ``Unavailable``."""
        return cls(unpacked(CACHE, PACKAGES, "usr/bin/srun"), work)

    def __enter__(self) -> Self:
        try:
            self._begin("slurmctld", "-D", "-c")
            for name in NODES:
                self.start_node(name)
            eventually(self._is_up, lambda: f"Slurm did not start:\n{self._logs()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _is_up(self) -> bool:
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(len(NODES))

    def __exit__(self, *error: object) -> None:
        # Steps end with their jobs: their daemons are not children of a slurmd, and must not be left.
        # As far as it goes: the daemons are ended below in any case, also where Slurm does not answer any more.
        with contextlib.suppress(OSError, subprocess.SubprocessError, AssertionError):
            for job in self.jobs():
                self.run("scancel", job)
            eventually(lambda: not self.steps(), lambda: f"steps were left: {self.steps()}")
        for name in list(self._daemons):
            self.stop(name)
        for process in self.steps():
            # It can end by itself between the listing and the kill.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        self._begin("slurmd", "-D", "-N", name, "-d", str(self._root / "usr/sbin/slurmstepd-wlm"), key=name)

    def _begin(self, program: str, *words: str, key: str = "") -> None:
        self._daemons[key or program] = subprocess.Popen(
            [f"{self._root}/usr/sbin/{program}-wlm", *words],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self, name: str) -> None:
        """End a daemon: ``slurmctld``, or a node's."""
        process = self._daemons.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Return a command's output."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def jobs(self) -> list[str]:
        """Return ids of the jobs that wait or run."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def job(self) -> str:
        """Return the one job that there is."""
        (job,) = self.jobs()
        return job

    def steps(self) -> list[psutil.Process]:
        """Return the processes of Slurm's that look after steps."""
        return list(self._steps())

    def _steps(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter(["name", "cmdline"]):
            # Processes of the whole machine end while they are listed.
            with contextlib.suppress(psutil.Error):
                found: dict[str, Any] = process.info
                if (found["name"] or "").startswith("slurmstepd") and self._is_ours(process):
                    yield process

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.environ().get("SLURM_CONF", "") == self.environment["SLURM_CONF"]

    def _logs(self) -> str:
        """Return the end of the daemons' logs."""
        logs = sorted(self.work.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in logs)


@contextlib.contextmanager
def running(work: Path) -> Iterator[SlurmCluster]:
    """Yield a cluster to which this process's variables lead, until the end of the block; skips the test where Slurm
    can't be had.

    Args:
        work: A directory for Slurm's files.
    """
    try:
        cluster = SlurmCluster.made(work)
    except Unavailable as error:
        pytest.skip(str(error))
    with cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster

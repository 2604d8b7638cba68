"""Launchers under test, each with a place where its ranks can run on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.ipyparallel import launchers
from hvdlab.launch import mpi
from hvdlab.launch.starter import Launcher
from support.fakes.popen_launcher import offer
from support.network import loopback as loopback_hosts


@dataclass(frozen=True)
class Site:
    """Launcher, and a place for its ranks.

    Attributes:
        name: The launcher's name.
        hosts: The hosts, as the launcher takes them.
        options: Options of the launcher, as text.
        most: How many ranks there is room for; ``None`` if the launcher has no such limit, or the number of ranks is fixed.
        no_room: Pattern of the error for more ranks than that.
        far: Whether ranks reach the coordinator over TLS.
        engine: Whether processes, threads and sockets of an engine come and go beside those of ranks.
        logs: Whether the engine logs the output of ranks itself, so that none of it comes here with the default settings.
    """

    name: str
    hosts: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    no_room: str = ""
    far: bool = False
    engine: bool = False
    logs: bool = False

    def launcher(self) -> Launcher:
        """Return the launcher; one that brings the output of programs here, if that is a setting."""
        if self.logs:
            from hvdlab.spark.launcher import SparkLauncher

            return SparkLauncher(captured=True)
        return launchers.find(self.name)

    @property
    def flags(self) -> list[str]:
        """Flags of ``hvdlab run`` for this launcher and place."""
        options = [word for pair in self.options.items() for word in ("--launcher-option", "=".join(pair))]
        return ["--launcher", self.name, *(["-H", self.hosts] if self.hosts else []), *options]


@contextlib.contextmanager
def _local(directory: Path) -> Iterator[Site]:
    yield Site("local")


@contextlib.contextmanager
def _ssh(directory: Path) -> Iterator[Site]:
    options = loopback_hosts.options(directory)
    yield Site(
        "ssh",
        loopback_hosts.named(1, 3),
        options,
        most=3,
        no_room="-np 4 needs 4 slots, but the hosts have 3",
        far=True,
    )


@contextlib.contextmanager
def _mpi(directory: Path) -> Iterator[Site]:
    if reason := mpi.why_unavailable():
        pytest.skip(reason)
    yield Site("mpi")


@contextlib.contextmanager
def _popen(directory: Path) -> Iterator[Site]:
    """Yield the launcher of an installed package."""
    offer(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        yield Site("popen")


@contextlib.contextmanager
def _slurm(directory: Path) -> Iterator[Site]:
    from support.clusters.slurm import running

    options = {"nodes": "2", "slots": "4", "args": "--ntasks-per-node=2"}
    with running(directory):
        yield Site(
            "slurm", "", options, 4, r"job \d+ has room for 4 ranks .*, not for 5", far=True, engine=True
        )


@contextlib.contextmanager
def _dask(directory: Path) -> Iterator[Site]:
    from support.clusters.dask import running

    no_room = "no room for it within 2 s: 1 ranks need as many slots; 2 workers have 4, of which 0 are free"
    with running(workers=2, threads=2) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASK_SCHEDULER_ADDRESS", cluster.scheduler_address)
        yield Site("dask", "", {"timeout": "2"}, 4, no_room, engine=True)


@contextlib.contextmanager
def _ray(directory: Path) -> Iterator[Site]:
    from support.clusters.ray import connected

    with (
        connected(2, num_cpus=2, object_store_memory=100 << 20) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield Site(
            "ray",
            "",
            {"timeout": "20"},
            4,
            "Ray had no room for it within 20 s; free: 0 of 4 CPUs",
            engine=True,
        )


@contextlib.contextmanager
def _spark(directory: Path) -> Iterator[Site]:
    from support.clusters.spark import context

    with context(slots=3):
        yield Site("spark", most=3, no_room="3 task slots for 4 ranks", engine=True, logs=True)


PLACES: Mapping[str, Callable[[Path], AbstractContextManager[Site]]] = {
    "local": _local,
    "ssh": _ssh,
    "mpi": _mpi,
    "popen": _popen,
    "slurm": _slurm,
    "dask": _dask,
    "ray": _ray,
    "spark": _spark,
}
"""Makes the place of each launcher, in a directory of its own."""

_PACKAGES = {"slurm": "distributed", "dask": "distributed", "ray": "ray", "spark": "pyspark"}
"""Modules that an engine needs. Slurm has none: it runs in the environment that has Dask, which ``make engines`` makes."""

PRESENT = tuple(name for name in PLACES if name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name]))
"""Launchers that this environment can test."""


def temporary_directory() -> AbstractContextManager[str]:
    """Return a directory whose path is short enough for Unix sockets."""
    return tempfile.TemporaryDirectory(prefix="hvd-t-", dir="/tmp")

"""Names of the launchers that a pool can use, and the launcher that starts ranks by one of ipyparallel's: PBS and others.

ipyparallel's launcher starts all ranks at once as ``python -m hvdlab.kernel_ext.rank``. They find the coordinator by their
environment, and the pool knows of them by their connections to it alone.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import common, threads_per_rank
from hvdlab.collectives.system import HostPosition
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.ipyparallel.cluster import IpyparallelCluster, load_ipyparallel
from hvdlab.launch import registry
from hvdlab.launch.hosts import parse_hosts
from hvdlab.launch.mpi import LACKS, MembershipRanks
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.starter import Capabilities, Capability, Launcher, LaunchRequest, RankObserver

LOCAL = "local"
MPI = "mpi"
_GROUP = "ipyparallel.engine_launchers"
"""Entry points of ipyparallel's launchers."""

PROGRAMS = {
    "htcondor": "condor_submit",
    "lsf": "bsub",
    "pbs": "qsub",
    "sge": "qsub",
    "sshproxy": "ssh",
}
"""The program that each of ipyparallel's launchers calls."""
START_WITHIN = 60.0
"""Seconds that a launcher has to hand the ranks to its system."""
PYTHON = Option("python", "interpreter of the ranks (default: python3 of the PATH there)")


def launcher_names() -> tuple[str, ...]:
    """Return the names that ``launcher=`` takes: hvdlab's and those of packages for it first, then ipyparallel's."""
    first = tuple(dict.fromkeys((LOCAL, MPI, *registry.names())))
    others = {entry.name.lower() for entry in entry_points(group=_GROUP)} - set(first)
    return (*first, *sorted(others))


def find(name: str) -> Launcher:
    """Return the launcher of this name.

    Raises:
        InvalidRequestError: There is none.
        StartError: It can't be imported.
    """
    name = name.lower()
    # Packages are looked through last: that reads the metadata of all of them, some tens of milliseconds before a pool starts.
    found = registry.find(name)
    if found is not None:
        return found
    if name not in launcher_names():
        raise InvalidRequestError(
            f"there is no launcher {name!r}; choose one of {', '.join(launcher_names())}."
        )
    return EngineSetLauncher(name)


def check_program(launcher: str) -> None:
    """Raise ``StartError`` if the program that one of ipyparallel's launchers calls is not installed."""
    program = PROGRAMS.get(launcher)
    if program is not None and shutil.which(program) is None:
        raise StartError(
            f"the launcher `{launcher}` needs `{program}`, which is not on the PATH; run the notebook on a host that "
            "has it, or choose another launcher, such as local."
        )


def engine_set_class(launcher: str) -> Any:
    """Return ipyparallel's class of engine sets of this name. Raises ``StartError`` if it can't be imported."""
    load_ipyparallel()
    for entry in entry_points(group=_GROUP):
        if entry.name.lower() == launcher:
            try:
                return entry.load()
            # The package of another author can fail in any way while it is imported.
            except Exception as error:
                raise StartError(
                    f"the launcher `{launcher}` ({entry.value}) can't be used: {type(error).__name__}: {error}"
                ) from error
    raise StartError(f"ipyparallel has no launcher `{launcher}` any more.")


@dataclass(frozen=True, slots=True)
class PoolRequest(LaunchRequest):
    """Request to start the ranks of a pool.

    Attributes:
        companion: Has the ipyparallel cluster of the pool.
    """

    companion: IpyparallelCluster | None = None


class EngineSetLauncher:
    """A :class:`~hvdlab.launch.starter.Launcher` by one of ipyparallel's launchers of engine sets.

    Args:
        name: The name of ipyparallel's launcher.
    """

    capabilities = Capabilities.all_but({**LACKS, Capability.PROGRAMS: "ipyparallel starts them"})
    forks = False

    def __init__(self, name: str) -> None:
        self.name = name

    def options(self) -> Sequence[Option]:
        """Return options for the interpreter, and for the launcher's own traits that hvdlab does not set."""
        traits = _own_traits(engine_set_class(self.name))
        return (PYTHON, *(Option(name, text, kind) for name, (text, kind) in sorted(traits.items())))

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``StartError`` if the launcher's program is not installed, ``InvalidRequestError`` for malformed hosts."""
        check_program(self.name)
        if hosts:
            parse_hosts(hosts)

    def is_far(self, hosts: str) -> bool:
        """Return True: only the launcher's system knows where ranks will run."""
        return True

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> EngineSetStarter:
        """Return the starter of a pool's ranks. Raises ``InvalidRequestError`` if the request is not for a pool."""
        if not isinstance(request, PoolRequest) or request.companion is None:
            raise InvalidRequestError(f"the launcher `{self.name}` starts ranks of notebooks only.")
        return EngineSetStarter(self.name, request, request.companion, ranks)


class EngineSetStarter:
    """Starts ranks by an engine set launcher of ipyparallel's.

    Args:
        launcher: The name of ipyparallel's launcher.
        request: The pool's request for ranks.
        companion: Has the cluster.
        ranks: Is notified of starts and ends of ranks.
    """

    def __init__(
        self, launcher: str, request: LaunchRequest, companion: IpyparallelCluster, ranks: RankObserver
    ) -> None:
        self._launcher, self._hosts, self._options = launcher, request.hosts, request.options
        self._module, self._world = request.module, request.world
        self._companion, self._connected = companion, MembershipRanks(request.client, ranks)
        self._size = 0
        self._stopped = threading.Event()

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have the launcher start all ranks; possible once.

        Raises:
            InvalidRequestError: Ranks were started before.
            StartError: The launcher could not start them.
        """
        if self._size:
            EngineSetLauncher.capabilities.require(
                Capability.SINGLE_RANKS, self._launcher, "stop the pool and start it anew."
            )
        self._size = size
        try:
            self._companion.call(self._start(size), Deadline(START_WITHIN))
        # The errors of ipyparallel's launchers, if their program is missing or refuses, have no common base.
        except Exception as error:
            raise StartError(
                f"the launcher `{self._launcher}` could not start the ranks: {type(error).__name__}: {error}"
            ) from error

    def signal(self, rank: int, number: int) -> None:
        """Send a rank of this host the signal. Ranks elsewhere end by the coordinator's message, or when the launcher stops."""
        self._connected.signal(rank, number)

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return None: only the launcher knows; a rank learns its place from its environment."""
        return None

    def close(self, timeout: float) -> None:
        """Give the launcher's program time to end after its ranks, so that it clears up."""
        if self._size:
            self._stopped.wait(timeout)

    async def _start(self, size: int) -> None:
        load_ipyparallel()
        cluster = self._companion.new_cluster(engine_launcher_class=engine_set_class(self._launcher))
        name = await cluster.start_engines(size, **self.traits(size))
        launched = cluster.engines[name]
        launched.on_stop(self._launcher_stopped)
        process = getattr(launched, "process", None)
        if process is not None:
            self._companion.watch_launcher(process.pid)
        if log := getattr(launched, "output_file", ""):
            self._companion.remove_files_on_exit(log)

    def traits(self, size: int) -> dict[str, Any]:
        """Return traits for the engine set's launcher with this many ranks."""
        environment = {**common(self._world), "HVDLAB_SIZE": str(size)}
        environment.setdefault(
            "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(size)))
        )
        given = {name: _plain(value) for name, value in self._options.items() if name != PYTHON.name}
        python = self._options.get(PYTHON.name) or "python3"
        options: dict[str, Any] = {
            "engine_cmd": [python, "-m", self._module],
            "environment": environment,
        }
        if self._hosts:
            options["engines"] = {host.name: host.slots for host in parse_hosts(self._hosts)}
        return {**options, **given}

    def _launcher_stopped(self, data: Any) -> None:
        """Report all ranks that never connected as ended: the launcher's program has ended, so they will not come."""
        self._stopped.set()
        code = (data or {}).get("exit_code")
        self._connected.end_all(self._size, f"the launcher `{self._launcher}` ended with exit code {code}")


_OURS = {
    "engine_cmd",
    "engine_args",
    "environment",
    "engines",
    "mpi_cmd",
    "work_dir",
    "n",
    "log",
    "config",
    "parent",
}
"""Traits that hvdlab sets itself."""


def _own_traits(launcher: Any) -> Mapping[str, tuple[str, OptionKind]]:
    """Return the configurable traits of a launcher's class whose values can be read from text: name to its help and kind."""
    from traitlets import Any as AnyTrait
    from traitlets import Int, List, Unicode

    found: dict[str, tuple[str, OptionKind]] = {}
    for name, trait in launcher.class_traits(config=True).items():
        kind = next(
            (
                kind
                for of, kind in (
                    (Unicode, OptionKind.TEXT),
                    (Int, OptionKind.COUNT),
                    (List, OptionKind.WORDS),
                )
                if isinstance(trait, of)
            ),
            OptionKind.TEXT if type(trait) is AnyTrait else None,
        )
        if kind is not None and name not in _OURS:
            found[name] = (str(trait.help).strip().partition("\n")[0], kind)
    return found


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

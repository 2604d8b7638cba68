"""Ranks that one of ipyparallel's own launchers starts: Slurm and others.

The launcher starts them all at once as ``python -m hvdlab.kernel_ext.rank``. They find the coordinator by their environment,
and the pool knows of them by their connections to it alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import common, threads_per_rank
from hvdlab.collectives.system import HostPosition
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.launchers import names
from hvdlab.kernel_ext.launchers.cluster import Companion
from hvdlab.kernel_ext.launchers.loading import load_ipyparallel
from hvdlab.launch.by_connection import LACKS, MembershipRanks
from hvdlab.launch.hosts import parse_hosts
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.starter import (
    Capabilities,
    Capability,
    LaunchRequest,
    RankObserver,
)

START_WITHIN = 60.0
"""Seconds that a launcher has to hand the ranks to its system."""

PYTHON = Option("python", "interpreter of the ranks (default: python3 of the PATH there)")


@dataclass(frozen=True, slots=True)
class PoolRequest(LaunchRequest):
    """Request to start the ranks of a pool.

    Attributes:
        companion: Has the ipyparallel cluster of the pool.
    """

    companion: Companion | None = None


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
        """The interpreter, and the launcher's own traits that hvdlab does not set."""
        traits = _own_traits(names.engine_set_class(self.name))
        return (PYTHON, *(Option(name, text, kind) for name, (text, kind) in sorted(traits.items())))

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raises ``StartError`` if the launcher's program is not installed, ``InvalidRequestError`` for malformed hosts."""
        names.check_program(self.name)
        if hosts:
            parse_hosts(hosts)

    def is_far(self, hosts: str) -> bool:
        """Always True: only the launcher's system knows where ranks will run."""
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
        request: What the ranks are started for.
        companion: Has the cluster.
        ranks: Takes what happens to ranks.
    """

    def __init__(
        self, launcher: str, request: LaunchRequest, companion: Companion, ranks: RankObserver
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
        # What ipyparallel's launchers raise when their program is missing or refuses has no common base.
        except Exception as error:
            raise StartError(
                f"the launcher `{self._launcher}` could not start the ranks: {type(error).__name__}: {error}"
            ) from error

    def signal(self, rank: int, number: int) -> None:
        """Send a rank of this host the signal. Ranks elsewhere end since the coordinator tells them to, or the launcher stops."""
        self._connected.signal(rank, number)

    def place(self, rank: int, size: int) -> HostPosition | None:
        """None: only the launcher knows; a rank learns its place from its environment."""
        return None

    def close(self, timeout: float) -> None:
        """Give the launcher's program time to end after its ranks, so that it clears up."""
        if self._size:
            self._stopped.wait(timeout)

    async def _start(self, size: int) -> None:
        load_ipyparallel()
        cluster = self._companion.new_cluster(engine_launcher_class=names.engine_set_class(self._launcher))
        name = await cluster.start_engines(size, **self.traits(size))
        launched = cluster.engines[name]
        launched.on_stop(self._launcher_stopped)
        process = getattr(launched, "process", None)
        if process is not None:
            self._companion.watch_launcher(process.pid)
        if log := getattr(launched, "output_file", ""):
            self._companion.guard(log)

    def traits(self, size: int) -> dict[str, Any]:
        """Traits of the engine set's launcher."""
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
        """The launcher's program has ended. Ranks that never connected will not come any more."""
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
    """Configurable traits of a launcher's class whose values can be read from text: name to its help and kind."""
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

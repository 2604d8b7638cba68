"""The launcher ``dask``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.dask.starter import DaskStarter, Room
from hvdlab.launch.environment import default_python
from hvdlab.launch.host_source import HostSource
from hvdlab.launch.hosts import is_local
from hvdlab.launch.options import Kind, Option
from hvdlab.launch.starter import Capabilities, Capability, LaunchRequest, RankObserver

ROOM_WITHIN = 100.0
"""Seconds that Dask has by default to get workers that have room for all ranks."""


class DaskLauncher:
    """Starts ranks on the workers of this process's Dask client, or of the scheduler at ``DASK_SCHEDULER_ADDRESS``."""

    name = "dask"
    capabilities = Capabilities.all_but(
        {Capability.KEEP: "their agents on Dask's workers belong to the notebook's client"}
    )
    forks = False

    def __init__(self) -> None:
        self._client: Any = None

    def options(self) -> Sequence[Option]:
        """How many ranks a worker takes, and what they run in."""
        return (
            Option("per_worker", "ranks of a worker (default: as many as it has threads)", Kind.COUNT),
            Option(
                "timeout",
                f"seconds within which there must be room for a rank (default: {ROOM_WITHIN:g})",
                Kind.COUNT,
            ),
            Option("python", "interpreter of the ranks on every worker (default: the path of this one)"),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raises ``InvalidRequestError`` if hosts are named, ``StartError`` without a Dask cluster."""
        if hosts:
            raise InvalidRequestError(
                "the launcher `dask` has its workers from Dask: name no hosts, but start workers where ranks are to be."
            )
        self._connected()

    def is_far(self, hosts: str) -> bool:
        """Unless the cluster is this host."""
        room = Room(self._connected())
        return not all(is_local(worker.machine) for worker in room.workers())

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> DaskStarter:
        """What starts the ranks of a job. Raises ``StartError`` without a Dask cluster."""
        options = request.options
        return DaskStarter(
            request,
            ranks,
            Room(self._connected(), int(str(options.get("per_worker", 0)))),
            python=str(options.get("python") or default_python()),
            timeout=float(str(options.get("timeout", ROOM_WITHIN))),
        )

    def source(self) -> HostSource:
        """The workers as hosts of an elastic job."""
        return _Workers(Room(self._connected()))

    def _connected(self) -> Any:
        if self._client is None or self._client.status != "running":
            self._client = connect()
        return self._client


class _Workers(HostSource):
    """Asks the scheduler."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def find(self) -> Mapping[str, int]:
        return {worker.name: worker.slots for worker in self._room.workers()}


def connect() -> Any:
    """This process's client, or a new one. Raises ``StartError`` if there is no cluster, or a client that can't be waited for."""
    try:
        import dask.config  # pyright: ignore[reportMissingImports]
        import distributed  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise StartError("the launcher `dask` needs Dask: pip install hvdlab[dask]") from error
    try:
        client = distributed.default_client()
    except ValueError:
        address = dask.config.get("scheduler-address", None)
        if not address:
            raise StartError(
                "there is no Dask cluster to start ranks on: make a distributed.Client first, or name a scheduler by "
                "DASK_SCHEDULER_ADDRESS."
            ) from None
        try:
            client = distributed.Client(address)
        except (OSError, TimeoutError, ValueError) as error:
            raise StartError(f"Dask's scheduler at {address} can't be reached: {error}") from error
    if client.asynchronous:
        raise StartError(
            "this process's Dask client is asynchronous, which can't be waited for; make one with asynchronous=False."
        )
    if client.scheduler.address.startswith("inproc://"):
        raise StartError(
            "Dask's workers are threads of this process, where ranks can't be; start them with processes=True."
        )
    return client

"""Where workers are placed: as close as there is room, or so many on each of so many nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hvdlab.collectives.errors import StartError
from hvdlab.ray.worker import BaseHorovodWorker

GROUP_TIMEOUT = 100.0
"""Seconds within which there must be room, unless the settings say otherwise."""


def imported() -> Any:
    """Return Ray's module. Raises ``StartError`` if it is missing."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise StartError(f"hvdlab.ray needs Ray ({error}): pip install 'hvdlab[ray]'") from error
    return ray


def create_placement_group(
    resources_per_bundle: Mapping[str, float], num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[Any, list[dict[str, float]]]:
    """Reserve room on the cluster.

    Args:
        resources_per_bundle: The resources of each bundle, such as ``{"CPU": 1}``.
        num_bundles: Number of bundles.
        pg_timeout: Seconds within which there must be room.
        pg_strategy: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.

    Returns:
        The placement group and its bundles.

    Raises:
        TimeoutError: There is no room; the message has the request and the free resources. Nothing stays reserved.
    """
    ray = imported()
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = ray.util.placement_group(bundles, strategy=pg_strategy)
    try:
        ready, _ = ray.wait([group.ready()], timeout=pg_timeout)
        if not ready:
            raise TimeoutError(
                f"Ray had no room within {pg_timeout:g} s for {num_bundles} x {dict(resources_per_bundle)} "
                f"({pg_strategy}). Requested resources: {_total(bundles)}; {free_resources()}. Ask for less, end what "
                "takes the rest, or add nodes; create_settings(placement_group_timeout_s=…) sets how long to wait."
            )
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group, bundles


def _total(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]} if bundles else {}


def free_resources() -> str:
    """Return the free and all resources of the cluster, in words."""
    ray = imported()
    free, whole = ray.available_resources(), ray.cluster_resources()
    kinds = [name for name in sorted(whole) if name in ("CPU", "GPU")]
    said = ", ".join(f"{free.get(name, 0.0):g} of {whole[name]:g} {name}s" for name in kinds) or "no CPUs"
    return f"free: {said} on {sum(bool(node['Alive']) for node in ray.nodes())} nodes"


def death_reason(error: BaseException) -> str:
    """Return why an actor is gone, on one line: Ray explains it on many, with ids that mean nothing to users."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line and ":" not in line.split(" ", 1)[0]]
    return " ".join(reasons) or type(error).__name__


class BaseStrategy(ABC):
    """Placement of workers on the cluster, in the order of their ranks."""

    placement_group: Any = None
    workers: list[Any]
    #: Whether the placement group was made here, and is removed by :meth:`shutdown`.
    _created_placement_group = False

    def __init__(
        self, settings: Any, use_gpu: bool, cpus_per_worker: int, gpus_per_worker: int | None
    ) -> None:
        self.settings = settings
        self.use_gpu = use_gpu
        self.cpus_per_worker, self.gpus_per_worker = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        self.workers = []

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Return the number of ranks."""

    @abstractmethod
    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """Place the workers.

        Returns:
            All workers, by rank, and of those one for each node. They may still be starting.

        Raises:
            TimeoutError: There is no room.
        """

    @property
    def timeout(self) -> float:
        """Return the seconds within which the cluster must have room."""
        return float(getattr(self.settings, "placement_group_timeout_s", None) or GROUP_TIMEOUT)

    def _resources(self, workers: int) -> dict[str, float]:
        taken = {"CPU": self.cpus_per_worker * workers, "GPU": (self.gpus_per_worker or 0) * workers}
        return {name: float(count) for name, count in taken.items() if count}

    def _create_worker(self, rank: int, bundle: int) -> None:
        ray = imported()
        strategies = ray.util.scheduling_strategies
        self.workers.append(
            ray.remote(BaseHorovodWorker)
            .options(
                num_cpus=self.cpus_per_worker,
                num_gpus=self.gpus_per_worker,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self.placement_group, placement_group_bundle_index=bundle
                ),
            )
            .remote(world_rank=rank, world_size=self.num_workers)
        )

    def _nodes_of_bundles(self) -> list[str]:
        """Return the node of each bundle of a group that is placed."""
        table = imported().util.placement_group_table(self.placement_group)["bundles_to_node_id"]
        return [table[bundle] for bundle in sorted(table)]

    def shutdown(self) -> None:
        """End the workers, and give back the room if it was reserved here."""
        ray = imported()
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self._created_placement_group:
            self._created_placement_group = False
            ray.util.remove_placement_group(self.placement_group)
            self.placement_group = None


class ColocatedStrategy(BaseStrategy):
    """The same number of workers on each of several nodes.

    Args:
        settings: Has the limit of the wait for room.
        num_hosts: Number of nodes.
        num_workers_per_host: Workers on each.
        use_gpu, cpus_per_worker, gpus_per_worker: The resources of a worker.
    """

    def __init__(
        self,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
    ) -> None:
        super().__init__(settings, use_gpu, cpus_per_worker, gpus_per_worker)
        self.num_hosts, self.num_workers_per_host = num_hosts, num_workers_per_host

    @property
    def num_workers(self) -> int:
        return self.num_hosts * self.num_workers_per_host

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        self.placement_group, _ = create_placement_group(
            self._resources(self.num_workers_per_host), self.num_hosts, self.timeout, "STRICT_SPREAD"
        )
        self._created_placement_group = True
        for rank in range(self.num_workers):
            self._create_worker(rank, rank // self.num_workers_per_host)
        return self.workers, self.workers[:: self.num_workers_per_host]


class PGStrategy(BaseStrategy):
    """Workers on as few nodes as have room, or in a placement group that is there.

    In a group that is made here, workers of a node have consecutive ranks. In a group that was there before, each worker uses any bundle.

    Args:
        settings: Has the limit of the wait for room.
        num_workers: Number of workers.
        use_gpu, cpus_per_worker, gpus_per_worker: The resources of a worker.
        placement_group: One to use; by default the one that the caller runs in, if any.
        force_create_placement_group: Reserve room of its own nevertheless.
    """

    def __init__(
        self,
        settings: Any,
        num_workers: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
        placement_group: Any = None,
        force_create_placement_group: bool = False,
    ) -> None:
        super().__init__(settings, use_gpu, cpus_per_worker, gpus_per_worker)
        self._num_workers = num_workers
        if not force_create_placement_group:
            self.placement_group = placement_group or imported().util.get_current_placement_group()

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        ray = imported()
        bundles = [-1] * self.num_workers
        if self.placement_group is None:
            self.placement_group, _ = create_placement_group(
                self._resources(1), self.num_workers, self.timeout, "PACK"
            )
            self._created_placement_group = True
            nodes = self._nodes_of_bundles()
            bundles = sorted(range(self.num_workers), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))
        for rank, bundle in enumerate(bundles):
            self._create_worker(rank, bundle)
        try:
            found = ray.get([worker.node_id.remote() for worker in self.workers], timeout=self.timeout)
        except ray.exceptions.GetTimeoutError:
            have = self.placement_group.bundle_specs
            raise TimeoutError(
                f"Workers had not started within {self.timeout:g} s: {self.num_workers} x {self._resources(1)} in a "
                f"placement group of {have}; {free_resources()}."
            ) from None
        firsts = {node: rank for rank, node in reversed(list(enumerate(found)))}
        return self.workers, [self.workers[rank] for rank in sorted(firsts.values())]

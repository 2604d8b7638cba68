"""``horovod.ray.elastic``: the older class for elastic calls on Ray."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.ray.adapter import START_TIMEOUT
from hvdlab.ray.discovery import RayHostDiscovery
from hvdlab.ray.elastic_v2 import ElasticAdapter, ElasticParams

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"]

T = TypeVar("T")


@dataclass
class ElasticSettings:
    """Settings from :meth:`ElasticRayExecutor.create_settings`, which explains its arguments.

    Attributes:
        num_proc: With how many ranks a call begins; ``None`` for ``min_num_proc``.
        start_timeout: Seconds within which workers must have joined.
        more: Further arguments, by name.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    start_timeout: float = START_TIMEOUT
    discovery: Any = None
    nics: Collection[str] | str | None = None
    ssh_identity_file: str | None = None
    cooldown_range: tuple[float, float] | None = None
    num_proc: int | None = None
    elastic: bool = True
    verbose: int = 1
    key: Any = field(default=None, repr=False)
    more: dict[str, Any] = field(default_factory=dict)


class ElasticRayExecutor:
    """Elastic calls on the Ray cluster to which this process is connected.

    ``RayExecutor(settings, min_workers=…)`` is the same, and has more.

    Args:
        settings: A result of :meth:`create_settings`.
        use_gpu: Whether a rank uses GPUs.
        cpus_per_slot: Ray's CPUs of a rank.
        gpus_per_slot: GPUs of a rank; by default one.
        env_vars: Variables of the ranks.
        override_discovery: Whether ranks run on the cluster's nodes; otherwise on hosts that ``settings.discovery`` finds.

    Raises:
        ValueError: GPUs are counted but not used, or used but fewer than one.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Return settings for an executor.

        Args:
            min_num_proc: Number of ranks with which a call begins and continues.
            max_num_proc: How many there are at most; by default as many as there is room for.
            reset_limit: How many lost ranks of a call are restarted; by default 10.
            elastic_timeout: Seconds that a call waits for nodes while it has too few ranks.
            timeout_s: Seconds within which the process of a rank must run. It must come to ``hvd.init()`` in as many once one has, and in no fewer
                than 60, or ``HVDLAB_START_TIMEOUT`` in ``env_vars``; the others begin without one that has not. One that is started later
                has ``elastic_timeout`` seconds.
            ssh_identity_file: Horovod's; nothing is started by ssh.
            nics: Interfaces of the driver, of which one must be reached from the other nodes.
            min_np, max_np: Older names of ``min_num_proc`` and ``max_num_proc``.
            kwargs: ``discovery``, ``cooldown_range``, ``num_proc``, ``verbose`` and ``key`` are kept under their names,
                others in ``more``.
        """
        for old, new, value in (
            ("min_np", "min_num_proc", min_np),
            ("max_np", "max_num_proc", max_np),
        ):
            if value is not None:
                warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=2)
        known = ("discovery", "cooldown_range", "num_proc", "verbose", "key")
        named = {name: kwargs.pop(name) for name in known if name in kwargs}
        return ElasticSettings(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            start_timeout=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            more=kwargs,
            **named,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings
        self.env_vars = dict(env_vars or {})
        self._params = ElasticParams(
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
        )
        self._adapter: ElasticAdapter | None = None

    def start(self) -> None:
        """Wait for room for ``min_num_proc`` ranks.

        Raises:
            TimeoutError: There is no room in time; the message has the request and the free resources.
            StartError: Ray is missing or not connected.
        """
        adapter = ElasticAdapter(self.settings, self._params)
        adapter.start(extra_env_vars=self.env_vars)
        self._adapter = adapter

    def run(
        self, worker_fn: Callable[[], T], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[T]:
        """Call ``worker_fn()`` on each rank; it uses ``hvd.elastic.run``.

        Args:
            worker_fn: The function; it may come from a notebook or a closure.
            callbacks: Called with each dict that a rank gives to :func:`hvdlab.ray.ray_logger.log`.

        Returns:
            The results of ``worker_fn``, by rank, of the ranks that existed at the end.

        Raises:
            RankFailedError: The job failed; it names the rank that failed first, and is also an instance of the class of that rank's exception.
            InvalidRequestError: This was not started.
        """
        if self._adapter is None:
            raise InvalidRequestError("This executor is not started: call start() first.")
        return self._adapter.run(worker_fn, callbacks=callbacks)

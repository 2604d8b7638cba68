"""Calls whose ranks come and go with the nodes of the cluster: ``RayExecutor(settings, min_workers=…)``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # has no types
import msgspec

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.settings import Settings
from hvdlab.launch.command import default_python
from hvdlab.launch.host_discovery import COOLDOWN, HostSource, as_host_source
from hvdlab.ray import discovery
from hvdlab.ray.adapter import Adapter, BaseParams, interfaces, start_timeout
from hvdlab.ray.launcher import connected_here
from hvdlab.ray.ray_logger import TOPIC
from hvdlab.ray.strategy import GROUP_TIMEOUT, free_resources
from hvdlab.runner.job import JobRun
from hvdlab.runner.job_spec import JobSpec, patience
from hvdlab.runner.output import ConsoleSink, Writer
from hvdlab.runner.run_function import pickled, results

_TURN = 0.5
"""Seconds between two looks at the nodes while there are too few."""
_RESETS = 10
"""How many lost ranks of a call are started anew, where the user says nothing."""


class RayHostDiscovery(discovery.RayHostDiscovery):
    """:class:`hvdlab.ray.elastic.RayHostDiscovery`, with the names that the arguments have here.

    Args:
        use_gpu: Whether a rank uses GPUs.
        cpus_per_worker: Ray's CPUs of a rank.
        gpus_per_worker: GPUs of a rank, with ``use_gpu``.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)


@dataclass
class ElasticParams(BaseParams):
    """Limits of the number of workers, and of the time with too few.

    Attributes:
        min_workers: Number of ranks with which a call begins and continues.
        max_workers: How many there are at most; as many as there is room for if ``None``.
        reset_limit: How many lost ranks of a call are restarted; 10 if ``None``.
        cooldown_range: Seconds that a node that failed is put aside the first time, and at most.
        elastic_timeout: Seconds that a call waits for nodes while it has too few ranks.
        override_discovery: Whether ranks run on the cluster's nodes; otherwise on hosts that ``settings.discovery`` finds.

    Raises:
        ValueError: No job has so many ranks.
    """

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_workers < 1 or (self.max_workers is not None and self.max_workers < self.min_workers):
            raise ValueError(
                f"min_workers={self.min_workers}, max_workers={self.max_workers}: there is one rank at least, and the second "
                "number is not below the first."
            )

    @property
    def elastic(self) -> bool:
        return True

    @property
    def adapter(self) -> type[ElasticAdapter]:
        return ElasticAdapter


class ElasticAdapter(Adapter):
    """Adapter that runs each call as an elastic job of processes in actors; see :mod:`hvdlab.ray.launcher`.

    Args:
        settings: The executor's.
        params: The parameters of the requested workers.
    """

    def __init__(self, settings: Any, params: ElasticParams) -> None:
        self.settings, self.params = settings, params
        self._source: HostSource | None = None
        self._environment: dict[str, str] = {}
        #: The class whose instance each rank gives to the functions of :meth:`execute`, and its arguments.
        self._executable: tuple[type, tuple[Any, ...], dict[str, Any]] | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        connected_here()
        source = self._make_source()
        timeout = float(getattr(self.settings, "placement_group_timeout_s", None) or GROUP_TIMEOUT)
        until = time.monotonic() + timeout
        while (there := sum(source.find().values())) < self.params.min_workers:
            if time.monotonic() >= until:
                each = {"CPU": self.params.cpus_per_worker, "GPU": self.params.gpus_per_worker or 0}
                raise TimeoutError(
                    f"Ray's nodes had room for {there} workers within {timeout:g} s, and min_workers is "
                    f"{self.params.min_workers}. Requested resources of each: { {k: v for k, v in each.items() if v} }; "
                    f"{free_resources()}. Ask for less, or add nodes; placement_group_timeout_s sets how long to wait."
                )
            threading.Event().wait(_TURN)  # Ray reports new nodes only when asked
        self._environment = {str(name): str(value) for name, value in (extra_env_vars or {}).items()}
        if executable_cls is not None:
            self._executable = (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        self._source = source

    def _make_source(self) -> HostSource:
        wanted = self.params
        if wanted.override_discovery:
            return discovery.RayNodes(wanted.cpus_per_worker, wanted.gpus_per_worker or 0)
        given = getattr(self.settings, "discovery", None)
        if given is None:
            raise InvalidRequestError("override_discovery=False needs settings.discovery, which finds hosts.")
        return as_host_source(given)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        return self._run(pickled(fn, tuple(args or ()), dict(kwargs or {})), callbacks)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        call = cloudpickle.dumps((fn, self._executable))
        return self._run(pickled(_with_executable, (call,), {}), callbacks)

    def _run(self, call: bytes, callbacks: Sequence[Callable[[Any], Any]] | None) -> list[Any]:
        if self._source is None:
            raise InvalidRequestError("This executor is not started: call start() first.")
        connected_here()

        def on_log(sender: int, body: bytes) -> None:
            info = msgspec.json.decode(body)
            for callback in callbacks or ():
                callback(info)

        wanted, timeout = self.params, start_timeout(self.settings)
        job = JobSpec(
            (default_python(),),
            wanted.min_workers,
            (),
            source=self._source,
            source_name="the source of Ray's nodes" if wanted.override_discovery else "settings.discovery",
            max_ranks=wanted.max_workers or MOST_RANKS,
            cooldown=COOLDOWN if wanted.cooldown_range is None else wanted.cooldown_range,
            elastic_timeout=float(wanted.elastic_timeout),
            function=call,
            environment=self._environment,
            interfaces=tuple(interfaces(self.settings)),
            launcher="ray",
            launcher_options={"cpus": str(wanted.cpus_per_worker), "gpus": str(wanted.gpus_per_worker or 0)},
            start_timeout=timeout,
            join_timeout=patience(self._environment, max(timeout, Settings().start_timeout)),
            min_ranks=wanted.min_workers,
            reset_limit=_RESETS if wanted.reset_limit is None else wanted.reset_limit,
            mail={TOPIC: on_log},
        )
        err = Writer(sys.stderr)
        done = JobRun(job, ConsoleSink(Writer(sys.stdout), err), err).run()
        if done.stopped:
            raise KeyboardInterrupt
        return results(done, max(done.outcomes, default=-1) + 1)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        raise UnsupportedError(
            "run_remote() is of executors with num_workers= or num_hosts=: the ranks of an elastic call come and go. Use run()."
        )

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        raise UnsupportedError(
            "execute_single() is of executors with num_workers= or num_hosts=: the ranks of an elastic call come and go. Use "
            "execute()."
        )

    def shutdown(self) -> None:
        """Do nothing: nothing runs between calls."""
        self._source = None


def _with_executable(call: bytes) -> Any:
    """Make the executable, on a rank, and call the function with it."""
    function, wanted = cloudpickle.loads(call)
    executable = None
    if wanted is not None:
        made, args, kwargs = wanted
        executable = made(*args, **kwargs)
    return function(executable)

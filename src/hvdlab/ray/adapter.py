"""Adapter that does an executor's work: its parameters and methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

START_TIMEOUT = 300.0
"""Seconds within which workers must have joined, unless the settings say otherwise."""


def start_timeout(settings: Any) -> float:
    """Return the seconds within which workers must have joined: of Horovod's settings, or hvdlab's."""
    found = getattr(settings, "start_timeout", None)
    if not isinstance(found, int | float):
        found = getattr(settings, "timeout_s", None)
    return float(found or START_TIMEOUT)


def interfaces(settings: Any) -> list[str]:
    """Return the interfaces of the driver that the settings name."""
    nics = getattr(settings, "nics", None)
    return [nics] if isinstance(nics, str) else sorted(nics or ())


@dataclass
class BaseParams:
    """Resources of the cluster for a worker.

    Attributes:
        cpus_per_worker: Ray's CPUs.
        use_gpu: Whether it uses GPUs.
        gpus_per_worker: How many; 1 if ``None`` with ``use_gpu``.

    Raises:
        ValueError: GPUs are counted but not used, or used but fewer than one.
    """

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker and not self.use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False. Set use_gpu=True to use GPUs.")
        if self.use_gpu and self.gpus_per_worker is not None and self.gpus_per_worker < 1:
            raise ValueError(
                f"gpus_per_worker={self.gpus_per_worker}: with use_gpu=True it must be at least 1."
            )
        self.gpus_per_worker = (self.gpus_per_worker or 1) if self.use_gpu else None


class Adapter(ABC):
    """The methods of :class:`hvdlab.ray.RayExecutor`, which documents them."""

    @abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None: ...

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]: ...

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]: ...

    @abstractmethod
    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]: ...

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any: ...

    @abstractmethod
    def shutdown(self) -> None: ...

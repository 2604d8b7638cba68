"""Backends: where an estimator's training function runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hvdlab.runner.run_function import run as run_here
from hvdlab.spark.runner import active_context, run


class Backend(ABC):
    """Backend that runs a function on ranks. Derive from it to train elsewhere than on Spark's executors."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on each rank and return its results, by rank.

        Args:
            fn: The function; cloudpickle must accept it.
            args, kwargs: Its arguments, the same on each rank; by default none.
            env: Variables to set for the ranks; by default none.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Return the number of ranks."""


class SparkBackend(Backend):
    """Ranks in the tasks of a Spark job, by :func:`hvdlab.spark.run`.

    Args:
        num_proc: Number of ranks; by default ``spark.default.parallelism``.
        env: Variables for the ranks. ``CUDA_VISIBLE_DEVICES`` is removed: it is the driver's.
        kwargs: Further arguments of ``run``, such as ``stdout`` or ``start_timeout``.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        self._num_proc, self._env, self._kwargs = num_proc, dict(env or {}), kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        environ = {**self._env, **(env or {})}
        environ.pop("CUDA_VISIBLE_DEVICES", None)
        return run(fn, args, kwargs, num_proc=self.num_processes(), env=environ, **self._kwargs)

    def num_processes(self) -> int:
        return int(active_context().defaultParallelism if self._num_proc is None else self._num_proc)


class LocalBackend(Backend):
    """Ranks on the driver's host, by :func:`hvdlab.run`; Spark only prepares the data.

    Args:
        num_proc: Number of ranks.
        env: Variables for the ranks.
        kwargs: Further arguments of ``hvdlab.run``.
    """

    def __init__(self, num_proc: int = 1, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc, self._env, self._kwargs = num_proc, dict(env or {}), kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        environ = {**self._env, **(env or {})}
        return run_here(fn, args, dict(kwargs or {}), num_proc=self._num_proc, env=environ, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc

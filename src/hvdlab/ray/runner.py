"""``hvdlab.ray.RayExecutor``: ranks that are actors of a Ray cluster, and stay until :meth:`RayExecutor.shutdown`."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hvdlab.collectives import system
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import WorldEnvironment, own_environment
from hvdlab.collectives.system import HOST_VARIABLE, host_key, host_position
from hvdlab.launch.processes import ExitStatus
from hvdlab.ray.adapter import START_TIMEOUT, Adapter, BaseParams, interfaces, start_timeout
from hvdlab.ray.elastic_v2 import ElasticParams
from hvdlab.ray.launcher import connected_here
from hvdlab.ray.ray_logger import TOPIC
from hvdlab.ray.strategy import (
    GROUP_TIMEOUT,
    BaseStrategy,
    ColocatedStrategy,
    PGStrategy,
    death_reason,
    free_resources,
    imported,
)
from hvdlab.ray.worker import Kind, WorkerInfo, WorkerReply
from hvdlab.runner.run_function import pickled, results
from hvdlab.runner.supervisor import JobResult

T = TypeVar("T")

_AFTER_A_FAILURE = 15.0
"""Seconds that the other ranks have to end a call that has failed on one; then they are interrupted."""
_AFTER_AN_INTERRUPT = 5.0
"""Seconds that interrupted ranks have to end a call."""
_CLOSING = 5.0
"""Seconds that ranks have to leave, and the coordinator to end."""


@dataclass
class MiniSettings:
    """Settings of an executor beside its workers; see :meth:`RayExecutor.create_settings`.

    Attributes:
        nics: Interfaces of the driver, of which one must be reached from the other nodes.
        verbose: Horovod's; it changes nothing.
        key: Horovod's; the coordinator has secrets of its own.
        ssh_port, ssh_identity_file: Horovod's; nothing is started by ssh.
        timeout_s: Seconds within which workers must have joined.
        placement_group_timeout_s: Seconds within which there must be room for them.
        elastic: False.
    """

    nics: Collection[str] | str | None = None
    verbose: int = 1
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = START_TIMEOUT
    placement_group_timeout_s: float = GROUP_TIMEOUT
    elastic: bool = False

    @property
    def start_timeout(self) -> float:
        """Return the seconds within which workers must have joined."""
        return self.timeout_s


@dataclass
class StaticParams(BaseParams):
    """Number of the workers, and their places.

    Attributes:
        num_workers: Number of workers, on as few nodes as have room.
        num_hosts: Number of nodes, instead.
        num_workers_per_host: Workers on each of these.
        use_current_placement_group: Whether ``num_workers`` go into the placement group that the caller runs in, if it does.
    """

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    @property
    def elastic(self) -> bool:
        return False

    @property
    def adapter(self) -> type[StaticAdapter]:
        return StaticAdapter


class RayExecutor:
    """Ranks that are actors of the Ray cluster to which this process is connected.

    Each rank is a separate process that lives until :meth:`shutdown`, and so do the objects in its memory. The ranks join one world
    when they start; ``hvd.init()`` in a rank finds it. Ranks of one node share memory.

    Args:
        settings: A result of :meth:`create_settings`. Of other settings objects ``placement_group_timeout_s``, ``start_timeout`` (or
            ``timeout_s``) and ``nics`` are used.
        num_workers: Number of ranks, on as few nodes as have room.
        num_hosts: Number of nodes, instead.
        num_workers_per_host: Ranks on each of these.
        cpus_per_worker: Ray's CPUs of a rank.
        use_gpu: Whether ranks have GPUs. Each rank sees the GPUs of all ranks on its node, so that its local rank is
            the index of its own.
        gpus_per_worker: How many; by default one.
        use_current_placement_group: Whether ``num_workers`` go into the placement group that this process runs in, if it does.
        min_workers: Makes calls elastic: each restarts its ranks, continues with so many of them, and lets in more as nodes
            come. ``fn`` then uses ``hvd.elastic.run``.
        max_workers: How many ranks there are at most; by default as many as there is room for.
        reset_limit: How many lost ranks are restarted in a call.
        cooldown_range: Seconds that a node on which a rank failed is put aside the first time, and at most.
        elastic_timeout: Seconds that a call waits for nodes while it has fewer ranks than ``min_workers``.
        override_discovery: Whether ranks run on the nodes of the cluster; otherwise on hosts that ``settings.discovery`` finds,
            which are names of Ray's ``node:<name>`` resources.

    Raises:
        ValueError: GPUs are counted but not used; ``max_workers`` is given without ``min_workers``; or this with
            ``num_workers``.
    """

    adapter: Adapter

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = GROUP_TIMEOUT,
        nics: Collection[str] | str | None = None,
    ) -> MiniSettings:
        """Return settings for an executor.

        Args:
            timeout_s: Seconds within which workers must have joined, once they have been placed.
            ssh_identity_file, ssh_str: Horovod's: if both are given and there is no such file, it is written, for its owner alone.
            placement_group_timeout_s: Seconds within which the cluster must have room for all workers.
            nics: Interfaces of the driver, of which one must be reached from the other nodes.
        """
        if ssh_str and ssh_identity_file and not Path(ssh_identity_file).exists():
            with open(os.open(ssh_identity_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(ssh_str)
        return MiniSettings(
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            nics=nics,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers is not None and not (min_workers and min_workers > 0):
            raise ValueError("max_workers is set, but min_workers is not a positive number.")
        if min_workers is not None and num_workers is not None:
            raise ValueError("Both `min_workers` and `num_workers` provided. Give one of them.")
        self.settings = settings
        self.params: StaticParams | ElasticParams
        if min_workers is not None:
            self.params = ElasticParams(
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
                cpus_per_worker=cpus_per_worker,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
            )
        else:
            self.params = StaticParams(
                num_workers=num_workers,
                num_hosts=num_hosts,
                num_workers_per_host=num_workers_per_host,
                cpus_per_worker=cpus_per_worker,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
                use_current_placement_group=use_current_placement_group,
            )
        settings.elastic = self.params.elastic

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Place the workers, let them join, and make the executable in each. After an error nothing is left on the cluster.

        Args:
            executable_cls: Called on each rank; may call ``hvd.init()``. :meth:`execute` gives its result to functions.
            executable_args, executable_kwargs: Its arguments.
            extra_env_vars: Variables that are set on each rank before.

        Raises:
            TimeoutError: The cluster has no room in time; the message has the request and the free resources.
            AssertionError: Both ``num_workers`` and ``num_hosts`` are set, or neither.
            StartError: Ray is missing or not connected, or workers did not join in time.
            RankFailedError: The class raised; also an instance of the class of its exception.
            InvalidRequestError: It is started already.
        """
        if hasattr(self, "adapter"):
            raise InvalidRequestError("This executor is started already; call shutdown() first.")
        adapter: Adapter = self.params.adapter(self.settings, self.params)  # type: ignore[arg-type]  # each names its own
        adapter.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
        self.adapter = adapter

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on each rank.

        When it fails on one rank, collectives of others that wait for this rank fail as well; calls that have not ended
        15 s later are interrupted. Workers keep their memory and can be called again, except one whose process has ended.

        Args:
            fn: The function; it may come from a notebook or a closure.
            args, kwargs: Its arguments; they and its result must be picklable.
            callbacks: Each is called here, on another thread, with each dict that a rank gives to
                :func:`hvdlab.ray.ray_logger.log`; all have been when this returns.

        Returns:
            Its results, by rank.

        Raises:
            RankFailedError: It failed on a rank, or that rank's process ended. The error is about the first such rank, has its number and
                traceback, and is also an instance of the class of its exception.
            InvalidRequestError: It can't be pickled, or the executor is not started.
            KeyboardInterrupt: This call was interrupted, and with it the ranks.
        """
        return self._started().run(fn, args, kwargs, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on each rank, and return at once.

        Args:
            fn: The function; cloudpickle must accept it.
            args, kwargs: Its arguments, the same on each rank; by default none.

        Returns:
            Ray's references to its results, by rank; ``ray.get`` of one raises the function's exception.
        """
        return self._started().run_remote(fn, args, kwargs)

    def execute(
        self, fn: Callable[[Any], T], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[T]:
        """Call a function of the executable on each rank.

        Args:
            fn: Called as ``fn(executable)``; the executable is ``None`` without a class.
            callbacks: As for :meth:`run`.

        Returns:
            The results, by rank.
        """
        return self._started().execute(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], T]) -> T:
        """Call ``fn(executable)`` on rank 0 and return its value. A collective in it fails: the other ranks are not called.

        Args:
            fn: Called as ``fn(executable)``; the executable is ``None`` without a class.
        """
        found: T = self._started().execute_single(fn)
        return found

    def shutdown(self) -> None:
        """End the workers, and give back the room. Does nothing if there are none."""
        if hasattr(self, "adapter"):
            self.adapter.shutdown()
            del self.adapter

    def _started(self) -> Adapter:
        if not hasattr(self, "adapter"):
            raise InvalidRequestError("This executor has no workers: call start() first.")
        return self.adapter


class StaticAdapter(Adapter):
    """The workers of an executor with a fixed number of them, and the world that they form.

    Args:
        settings: The executor's.
        params: The parameters of the requested workers.

    Attributes:
        strategy: Places them; ``None`` before :meth:`start`.
        workers: Handles of the actors, by rank.
    """

    def __init__(self, settings: Any, params: StaticParams) -> None:
        self.settings, self.params = settings, params
        self.strategy: BaseStrategy | None = None
        self.workers: list[Any] = []
        #: The workers' places, by rank.
        self._cards: list[WorkerInfo] = []
        #: The coordinator and the connection to it, from :meth:`start` to :meth:`shutdown`.
        self._coordinator: CoordinatorProcess | None = None
        self._client: Client | None = None
        #: Numbers of the calls, which make their names for the coordinator unique.
        self._calls = itertools.count()
        #: How many interrupts each rank was sent.
        self._interrupts: Counter[int] = Counter()
        #: Those of the running call; lines that ranks log at other times are dropped.
        self._callbacks: tuple[Callable[[Any], Any], ...] = ()

    # -- the world ----------------------------------------------------------------------------------------------------

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        connected_here()
        extra = {str(name): str(value) for name, value in (extra_env_vars or {}).items()}
        try:
            self.strategy = self._make_strategy()
            self.workers, _ = self.strategy.create_workers()
            self._cards = self._wait(
                [worker.card.remote() for worker in self.workers], self.strategy.timeout, "started"
            )
            self._join(extra)
            if executable_cls is not None:
                call = pickled(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
                self._called("class", call, self.workers, executable_cls)
        except BaseException:
            self.shutdown()
            raise

    def _make_strategy(self) -> BaseStrategy:
        wanted = self.params
        each = (wanted.use_gpu, wanted.cpus_per_worker, wanted.gpus_per_worker)
        assert not (wanted.num_workers and wanted.num_hosts), "Give num_workers or num_hosts, not both."
        if wanted.num_hosts:
            return ColocatedStrategy(self.settings, wanted.num_hosts, wanted.num_workers_per_host, *each)
        assert wanted.num_workers, "Give num_workers or num_hosts: how many ranks there are."
        return PGStrategy(
            self.settings,
            wanted.num_workers,
            *each,
            force_create_placement_group=not wanted.use_current_placement_group,
        )

    def _join(self, extra: dict[str, str]) -> None:
        """Start the coordinator, and let the workers join."""
        cards, size = self._cards, len(self._cards)
        here = host_key(), os.getuid()
        address = None
        # Also for another user on this host: the coordinator refuses a peer of another user at its Unix
        # socket.
        if any((card.host, card.user) != here for card in cards):
            address = self._address()
        self._coordinator = CoordinatorProcess.start(
            size=size, tcp_host=address, environ={**os.environ, **extra}
        )
        self._client = Client.connect(self._coordinator.address, self._coordinator.client_token)
        self._client.on_mail(TOPIC, self._on_log)
        where = (self._coordinator.tls_address if address else None) or self._coordinator.address
        world = WorldEnvironment(
            where,
            self._coordinator.token,
            self._coordinator.certificate if address else None,
            master_address=cards[0].address,
            master_port=cards[0].port,
        )
        # Two nodes may be one machine (tests), and a node's workers may be containers that share no memory.
        hosts = [f"{card.host} {card.node}" for card in cards]
        updates, joins = [], []
        for rank, (worker, host) in enumerate(zip(self.workers, hosts, strict=True)):
            stands = host_position(rank, range(size), hosts)
            own = own_environment(world, rank, size, stands)
            environment = {**self._gpus(host, hosts), **extra, **own, HOST_VARIABLE: host}
            # No wait between the two calls: an actor runs its calls in the order in which it gets them.
            updates.append(worker.update_env_vars.remote(environment))
            joins.append(worker.connect.remote(stands.local_size, self._start_timeout))
        self._wait(updates, self._start_timeout, "got their variables")
        # Longer than the workers' own limit, since their error says more than that they are late.
        self._wait(joins, self._start_timeout + _CLOSING, "joined")

    def _gpus(self, host: str, hosts: Sequence[str]) -> dict[str, str]:
        """Return the visible GPUs of each rank: the same for all ranks of a host and in the same order, as NCCL needs between them."""
        if not self.params.use_gpu:
            return {}
        found = [
            gpu for card, other in zip(self._cards, hosts, strict=True) if other == host for gpu in card.gpus
        ]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(found))}

    def _address(self) -> str:
        """Return where the other nodes reach the coordinator."""
        if nics := interfaces(self.settings):
            return system.interface_address(nics)
        return system.chosen_address(os.environ) or system.outward_address(
            [card.address for card in self._cards]
        )

    @property
    def _start_timeout(self) -> float:
        return start_timeout(self.settings)

    def _wait(self, references: list[Any], timeout: float, what: str) -> list[Any]:
        """Wait for the references and return the values, by rank."""
        ray = imported()
        ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout)
        values, late = [], []
        for rank, reference in enumerate(references):
            if reference not in ready:
                late.append(rank)
                continue
            try:
                values.append(ray.get(reference))
            except ray.exceptions.RayTaskError as error:
                raise StartError(f"rank {rank} did not start: {error.cause}") from error
            except ray.exceptions.RayError as error:
                raise StartError(f"rank {rank} did not start: {death_reason(error)}") from error
        if late:
            raise StartError(
                f"ranks {late} of {len(references)} had not {what} within {timeout:g} s; {free_resources()}. "
                "create_settings(timeout_s=…, placement_group_timeout_s=…) gives them longer."
            )
        return values

    # -- calls --------------------------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        call = pickled(fn, tuple(args or ()), dict(kwargs or {}))
        return self._called("function", call, self.workers, fn, callbacks)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        return self._called("method", pickled(fn, (), {}), self.workers, fn, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        call = pickled(fn, tuple(args or ()), dict(kwargs or {}))
        references: list[Any] = []
        self._submit("function", call, self.workers, fn, references, remotely=True)
        return references

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self._called("method", pickled(fn, (), {}), self.workers[:1], fn)[0]

    def _submit(
        self,
        what: Kind,
        call: bytes,
        workers: Sequence[Any],
        function: Callable[..., Any],
        references: list[Any],
        *,
        remotely: bool = False,
    ) -> None:
        """Send a call to the first of the workers, and append the references to the results. The coordinator knows of it before any rank does."""
        assert self._client is not None
        cell = f"ray-{next(self._calls)}"
        label = getattr(function, "__qualname__", type(function).__qualname__)
        self._client.cell_started(cell, range(len(workers)), label=label)
        self._client.flush(events=False)  # the call takes another way than mail
        for rank, worker in enumerate(workers):
            perform = worker.perform_remotely if remotely else worker.perform
            references.append(perform.remote(call, what, cell, self._interrupts[rank]))

    def _called(
        self,
        what: Kind,
        call: bytes,
        workers: Sequence[Any],
        function: Callable[..., Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Make a call on the first of the workers. Returns its results; raises the first error."""
        assert self._client is not None
        self._callbacks = tuple(
            callbacks or ()
        )  # before the call: a rank may log while others are still sent theirs
        references: list[Any] = []
        try:
            self._submit(what, call, workers, function, references)
            done = self._outcome(references)
            if callbacks:
                with contextlib.suppress(TimeoutError):  # a rank that hangs is reported below
                    self._client.collect_events()
        except KeyboardInterrupt:
            # Wherever it came, ranks may have the call, also one that is not among the references yet; they would keep the next call waiting.
            self._interrupt(range(len(workers)))
            if references:
                imported().wait(references, num_returns=len(references), timeout=_AFTER_AN_INTERRUPT)
            raise
        finally:
            self._callbacks = ()
        return results(done, len(references))

    def _outcome(self, references: list[Any]) -> JobResult:
        ray = imported()
        ranks = {reference: rank for rank, reference in enumerate(references)}
        pending, end = list(references), None
        done = JobResult()
        causes: list[int] = []
        interrupted = False
        while pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready, pending = ray.wait(pending, timeout=left)
            for reference in ready:
                rank = ranks[reference]
                if self._failed(reference, rank, done):
                    causes.append(rank)
            if not ready and interrupted:
                break
            if not ready:
                interrupted, end = True, time.monotonic() + _AFTER_AN_INTERRUPT
                self._interrupt([ranks[reference] for reference in pending])
            elif done.code and end is None:
                end = time.monotonic() + _AFTER_A_FAILURE
        done.failed = (
            causes[0]
            if causes
            else next((rank for rank in done.outcomes if not done.outcomes[rank].ok), None)
        )
        return done

    def _failed(self, reference: Any, rank: int, done: JobResult) -> bool:
        """Record how a call has ended on a rank; returns whether it failed, and not for another rank's failure."""
        ray = imported()
        try:
            reply: WorkerReply = ray.get(reference)
        except ray.exceptions.RayError as error:
            text = death_reason(error)
            done.outcomes[rank] = ExitStatus(1, 0, text)
            done.code = 1
            assert self._client is not None
            self._client.rank_lost(rank, self._cards[rank].pid, text)
            return True
        done.outcomes[rank] = ExitStatus(1 if reply.error else 0)
        done.results[rank] = reply.outcome
        done.code = done.code or done.outcomes[rank].code
        return bool(reply.error) and not reply.culprits

    def _interrupt(self, ranks: Sequence[int]) -> None:
        assert self._client is not None
        self._interrupts.update(ranks)
        with contextlib.suppress(ConnectionError):  # then the ranks end by themselves
            self._client.interrupt(ranks)

    def _on_log(self, sender: int, body: bytes) -> None:
        info = msgspec.json.decode(body)
        for callback in self._callbacks:
            callback(info)

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End everything. Idempotent; also after an unfinished start."""
        ray = imported()
        # Each field is cleared before its object ends, so that a second call finds none.
        strategy, self.strategy = self.strategy, None
        workers, self.workers = self.workers, []
        # After ray.shutdown() no worker is left, and a call would start a cluster.
        if strategy is not None and ray.is_initialized():
            if self._client is not None and workers:
                leaving = [worker.leave.remote() for worker in workers]
                ray.wait(leaving, num_returns=len(leaving), timeout=_CLOSING)
            strategy.shutdown()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close(_CLOSING)

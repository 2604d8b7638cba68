"""The actor that is a rank."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]  # has no types

from hvdlab.collectives import context
from hvdlab.collectives.context import with_own_errors
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.failures import cut_own_frames, describe_uncaught
from hvdlab.collectives.settings import free_port, thread_counts
from hvdlab.collectives.system import host_key
from hvdlab.runner.function_worker import raised, returned, unpickled_call

Kind = Literal["class", "method", "function"]
"""What a call's function is: the class of the executable, called with the executable, or called with its arguments."""


@dataclass(frozen=True)
class WorkerInfo:
    """Place of a worker.

    Attributes:
        node: Its Ray node's id.
        host: Key of the host with which it shares memory; see :func:`hvdlab.collectives.system.host_key`.
        user: Its user id.
        pid: Its process id.
        address: An address of its node that the others reach.
        port: A TCP port of that address that is free now.
        gpus: The GPUs that Ray gave to it.
    """

    node: str
    host: str
    user: int
    pid: int
    address: str
    port: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class WorkerReply:
    """Outcome of a call on a rank.

    Attributes:
        outcome: A pickled ``FunctionReturned`` or ``FunctionRaised``.
        error: One line, empty if it returned.
        culprits: Ranks whose failure caused its exception, if any.
    """

    outcome: bytes
    error: str = ""
    culprits: tuple[int, ...] = ()


class BaseHorovodWorker:
    """One rank, as an actor (``ray.remote(BaseHorovodWorker)``). It may be subclassed.

    Calls of an executor are like cells of a notebook: an error on this rank ends the call on all ranks that wait for this rank,
    and the worker, its executable and its memory stay for the next call.

    Args:
        world_rank: Its rank.
        world_size: Number of ranks.

    Attributes:
        executable: The object that ``executable_cls`` made, or ``None``.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.world_rank, self.world_size = world_rank, world_size
        #: This rank's engine, from :meth:`connect` on.
        self._engine: Engine | None = None
        #: Whether a call runs: Ray's own code between calls must not be interrupted.
        self._interruptible = False
        #: Interrupts that have arrived, and those that the driver had sent before the call that runs: more are for it, also
        #: if they were faster than the call.
        self._interrupts, self._interrupts_before = 0, 0

    def __repr__(self) -> str:
        """Return the text that Ray shows in front of its output."""
        return f"rank {self.world_rank}"

    def hostname(self) -> str:
        """Return the host's name."""
        return socket.gethostname()

    def node_id(self) -> str:
        """Return the Ray node's id, in hexadecimal."""
        import ray  # pyright: ignore[reportMissingImports]

        return str(ray.get_runtime_context().get_node_id())

    def get_gpu_ids(self) -> list[Any]:
        """Return the GPUs that Ray gave to this worker."""
        import ray  # pyright: ignore[reportMissingImports]

        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set variables of this process, to the values as ``str`` writes them.

        Args:
            env_vars: The variables by their names.
        """
        os.environ.update({str(name): str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return the variables of this process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the executable of this worker.

        Args:
            executable_cls: Its class; ``None`` makes none.
            executable_args: Positional arguments for the class.
            executable_kwargs: Keyword arguments for the class.
        """
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the executable of this worker.

        Args:
            func: A function of the executable.

        Returns:
            The function's result.
        """
        return func(self.executable)

    # -- the executor's interface -------------------------------------------------------------------------------------

    def card(self) -> WorkerInfo:
        """Return the place of this worker."""
        import ray  # pyright: ignore[reportMissingImports]

        address = str(ray.util.get_node_ip_address())
        gpus = tuple(map(str, self.get_gpu_ids()))
        return WorkerInfo(
            self.node_id(), host_key(), os.getuid(), os.getpid(), address, free_port(address), gpus
        )

    def connect(self, local_size: int, start_timeout: float) -> None:
        """Join the world that the variables name, for as long as this worker lives; ``hvd.init()`` then finds it.

        Args:
            local_size: Number of ranks on this worker's host.
            start_timeout: Seconds until all ranks are there.

        Raises:
            StartError: The coordinator does not answer, or other ranks are not there in time.
        """
        os.environ.update(thread_counts(os.environ, local_size))
        settings = dataclasses.replace(context.take_settings(), cells_tracked=True)
        self._engine = engine = Engine.connect(settings)
        engine.wait_for_world(start_timeout)
        if settings.timeline and engine.rank == 0:
            engine.start_timeline(settings.timeline, settings.mark_cycles)
        context.adopt(engine)
        main = threading.main_thread()
        # Python accepts handlers on the main thread alone, and Ray runs the methods of concurrent actors on
        # other threads.
        if threading.current_thread() is main and main.ident is not None:
            ident = main.ident
            signal.signal(signal.SIGINT, self._on_signal)
            signal.pthread_sigmask(
                signal.SIG_UNBLOCK, {signal.SIGINT}
            )  # Ray starts its processes with it blocked
            engine.on_interrupt(lambda: self._on_interrupt(ident))

    def _on_interrupt(self, main: int) -> None:
        """Send the main thread an interrupt, on the engine's thread."""
        # Before the signal, whose handler compares the counts.
        self._interrupts += 1
        signal.pthread_kill(main, signal.SIGINT)

    def perform(self, call: bytes, what: Kind, cell: str, interrupts: int = 0) -> WorkerReply:
        """Make a call of the driver's, and report how it ended.

        Args:
            call: The pickled call.
            what: Kind of its function.
            cell: The call's name for the coordinator.
            interrupts: How many interrupts the driver had sent to this rank before.
        """
        try:
            return WorkerReply(returned(self._perform(call, what, cell, interrupts)))
        except BaseException as raw:  # noqa: BLE001  # SystemExit, too: it would end the actor without a word
            error = with_own_errors(raw)
            said = describe_uncaught(error, self.world_rank)
            while (
                trace := error.__traceback__
            ) is not None and trace.tb_frame.f_code.co_filename == __file__:
                error.__traceback__ = trace.tb_next
            if isinstance(error, HvdlabError):
                cut_own_frames(error.__traceback__)
            return WorkerReply(bytes(cloudpickle.dumps(raised(error))), said.error, said.culprits)

    def perform_remotely(self, call: bytes, what: Kind, cell: str, interrupts: int = 0) -> Any:
        """Run a call for callers that get Ray's references: return the function's result, and raise its exception.

        Args:
            call: The pickled function and its arguments.
            what: Whether it makes the executable, gets it, or does without.
            cell: Name of the call, for reports.
            interrupts: Interrupts that this worker had got before the call.
        """
        return self._perform(call, what, cell, interrupts)

    def _perform(self, call: bytes, what: Kind, cell: str, interrupts: int) -> Any:
        engine = self._engine
        assert engine is not None, "connect() comes first"
        engine.begin_cell(cell)
        error: str | None = None
        try:
            self._interrupts_before = interrupts
            self._interruptible = True
            # After the flag: an interrupt that comes between the two is raised by the handler, an earlier
            # one by this call.
            self._on_signal(signal.SIGINT, None)  # it may have come before
            function, args, kwargs = unpickled_call(call)
            if what == "class":
                return self.start_executable(function, args, kwargs)
            if what == "method":
                return self.execute(function)
            return self.execute(lambda executable: function(*args, **kwargs))
        except BaseException as problem:
            error = describe_uncaught(problem, self.world_rank).error
            raise
        finally:
            # First: an interrupt inside end_cell() would leave the call open for the coordinator.
            self._interruptible = False
            engine.end_cell(cell, error)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._interruptible and self._interrupts > self._interrupts_before:
            raise KeyboardInterrupt

    def leave(self) -> None:
        """Leave the world in order."""
        engine, self._engine = self._engine, None
        context.adopt(None)
        if engine is not None:
            engine.close()

"""The main program of a rank: a loop on the main thread, in which the agent runs cells.

The rank counts as ready once its agent listens; ipyparallel's side is set up later, when the pool sends the
controller's address and no cell is running.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from ipykernel import zmqshell
from traitlets.config import Config

from hvdlab.bindings.framework_hooks import devices_in_use, set_environment
from hvdlab.collectives import context, system
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.metrics.sampler import ask_frameworks
from hvdlab.horovod.import_hook import offer
from hvdlab.kernel_ext.rank.agent import RankAgent
from hvdlab.kernel_ext.rank.ipyparallel_engine import join_controller
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.wire.channel import ENVIRONMENT, JOIN, JOINED, READY, WHO
from hvdlab.kernel_ext.wire.crash_ring import CrashRing
from hvdlab.kernel_ext.wire.status import offer_dumps
from hvdlab.launch.forkserver.program import StdPipes

LEAVE_WITHIN = 2.0
"""Seconds that a rank has to end by itself after an order to leave or SIGTERM, whatever its cell does."""


class RankProgram:
    """A rank's process.

    Args:
        argv: Options for ipyparallel's engine.
        pipes: Pipes for the output, if the process that started the rank made them.
        unsent: Descriptor of an area for output that was not sent, if that process made one; else -1.
    """

    def __init__(self, argv: Sequence[str], pipes: StdPipes | None, unsent: int) -> None:
        self._argv = tuple(argv)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._fds = FdCapture(pipes)
        self._log = open(self._fds.originals["stderr"], "w", buffering=1, closefd=False)  # noqa: SIM115
        # What is neither a cell's nor a request's belongs in the log, not in the notebook.
        sys.stdout = sys.stderr = self._log
        # Into the log, which another process reads: a dump into our own pipe could come out as the cell's output.
        faulthandler.enable(self._log)
        offer_dumps()
        # This removes the token from the environment, which every child of the rank and crash reporters show.
        settings = context.take_settings()
        self._engine = Engine.connect(dataclasses.replace(settings, cells_tracked=True))
        self._agent = RankAgent(
            make_shell(),
            self._loop,
            self._engine,
            fds=self._fds,
            unsent=_area(unsent),
        )
        self._joining: asyncio.Task[None] | None = None
        self._done = threading.Event()

    def run(self) -> int:
        """Serve until the pool wants the rank to leave. Returns the exit code."""
        signal.signal(signal.SIGTERM, self._terminate)
        self._agent.start()
        self._engine.on_mail(ENVIRONMENT, self._on_environment)
        self._engine.on_mail(JOIN, self._on_join)
        self._engine.on_mail(WHO, lambda sender, body: self._engine.post(READY, b""))
        self._engine.on_leave(self._on_leave)
        # After all handlers are registered: the pool sends cells as soon as it has this.
        self._engine.post(READY, b"")
        try:
            self._loop.run_forever()
        finally:
            # First, while the engine is open: the last output leaves as its mail.
            self._agent.close()
            self._engine.close(1.0)
            self._done.set()
        return 0

    # -- control thread -----------------------------------------------------------------------------------------------

    def _on_environment(self, sender: int, body: bytes) -> None:
        variables = msgspec.msgpack.decode(body, type=dict[str, str])
        # On the main thread between cells: a cell sees one environment from its beginning to its end.
        self._loop.call_soon_threadsafe(os.environ.update, variables)

    def _on_join(self, sender: int, body: bytes) -> None:
        self._loop.call_soon_threadsafe(self._join, body.decode())

    def _on_leave(self, reason: str = "") -> None:
        threading.Thread(target=self._end_anyway, name="hvdlab-leave", daemon=True).start()

    def _end_anyway(self) -> None:
        """Exit if the loop has not ended in time: a main thread that is stuck in foreign code can't be asked to end it.

        Once the loop has ended, exit handlers may take as long as they need.
        """
        if not self._done.wait(LEAVE_WITHIN):
            # At this point it is ExitFlush's, which sends the last output first.
            os._exit(1)

    # -- main thread --------------------------------------------------------------------------------------------------

    def _join(self, request: str) -> None:
        self._joining = self._loop.create_task(self._join_controller(request, self._joining))

    async def _join_controller(self, request: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:  # with a controller that is gone: that attempt fails, or has failed
            await before
        if self._joining is not asyncio.current_task():
            return  # another request came meanwhile, and has a task of its own
        answer = await join_controller(self._agent, self._engine.rank, request, self._argv)
        self._engine.post(JOINED, answer.encode())

    def _terminate(self, number: int, frame: Any) -> None:
        """End as a process that SIGTERM ends, but after the exit handlers of the user's code."""
        # First: an exit handler may never return, and this thread ends the process nevertheless.
        self._on_leave()
        atexit._run_exitfuncs()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class ZMQInteractiveShell(zmqshell.ZMQInteractiveShell):
    """Shell of a rank, with plain attributes in place of the traits that IPython sets or reads for each cell.

    To set a trait takes thirty calls, even of a shell that no one observes. Those that a user can configure stay traits.
    """

    # Libraries find out by the name of the class and of its module whether they run in a notebook.
    __module__ = zmqshell.__name__

    last_execution_succeeded = True
    last_execution_result: Any = None
    builtin_trap: Any = None
    display_trap: Any = None
    history_manager: Any = None
    magics_manager: Any = None
    payload_manager: Any = None
    prefilter_manager: Any = None


def make_shell() -> ZMQInteractiveShell:
    """Return the shell that cells and ipyparallel's requests run in. Its history stays in memory."""
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    config.HistoryManager.enabled = True
    if not _is_writable(Path(os.environ.get("IPYTHONDIR") or Path.home() / ".ipython")):
        # IPython would make a temporary directory for each rank, and never remove it. All ranks of the user share this one.
        own = (
            system.choose_private(
                [parent / system.private_name() for parent in system.private_parents(os.environ)]
            )
            / "ipython"
        )
        for directory in (own.parent, own):  # a parent that mkdir() makes beside would be open to others
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["IPYTHONDIR"] = str(own)
    shell: ZMQInteractiveShell = ZMQInteractiveShell.instance(config=config)
    # The shell sets it, and libraries such as Lightning take it for a sign that the user types at a terminal, where they refuse to
    # train on several processes. A rank is one of several processes, and has no terminal.
    del sys.ps1
    return shell


def _is_writable(directory: Path) -> bool:
    """Return whether files can be made in a directory, or it can be made in the one above, as IPython wants it."""
    there = directory if directory.exists() else directory.parent
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _area(descriptor: int) -> CrashRing | None:
    if descriptor < 0:
        return None
    try:
        return CrashRing(descriptor)
    except OSError:  # no room for it in this process
        return None


def run(argv: Sequence[str], pipes: StdPipes | None = None, unsent: int = -1) -> int:
    """Be a rank with the settings of the environment (:class:`~hvdlab.collectives.settings.Settings`) until it is to leave.

    Returns the exit code.
    """
    # Frameworks read their environment when they are imported, which the first cell may do.
    set_environment()
    offer()
    ask_frameworks(devices_in_use)
    return RankProgram(argv, pipes, unsent).run()

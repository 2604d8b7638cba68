"""The processes that a fork server looks after: reading their pipes, ending them, reporting their ends."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import sys
import time

from hvdlab.launch.exits import OutOfMemoryCounter
from hvdlab.launch.forkserver.messages import CONTROLLER, Forked
from hvdlab.launch.forkserver.pipes import READ_SIZE, ChildPipes
from hvdlab.launch.forkserver.program import ForkedProgram
from hvdlab.launch.forkserver.server_state import ChildEnded, ChildWrote, ControllerListens, Event

LOOK_EVERY = 1.0
"""Seconds between two looks at the memory of adopted processes."""


class ChildTable:
    """Children that were forked here, and processes that were adopted.

    Args:
        selector: Gets their descriptors, each with a callable that returns what has happened.
        program: Reads what ended ranks have left behind.
    """

    def __init__(self, selector: selectors.BaseSelector, program: ForkedProgram) -> None:
        self._selector, self._program = selector, program
        self._memory = OutOfMemoryCounter()
        self._pipes: dict[int, ChildPipes] = {}
        self._looked = time.monotonic()

    def add(self, pipes: ChildPipes) -> None:
        """Look after one more child."""
        self._pipes[pipes.number] = pipes
        if pipes.log >= 0:
            self._watch(pipes.log, functools.partial(self._read_log, pipes))
        if pipes.channel is not None:
            self._watch(pipes.channel, self._read_controller)
        if pipes.pidfd >= 0:
            self._watch(pipes.pidfd, functools.partial(self._adopted_ended, pipes))

    def adopt(self, child: Forked) -> list[Event]:
        """Look after a process that another fork server has forked."""
        pipes = ChildPipes.adopt(child)
        if pipes is None:
            return [ChildEnded(child.pid, out_of_memory=self._memory.increased())]
        self.add(pipes)
        return []

    def next_look(self) -> float | None:
        """Seconds until :meth:`look` is due; ``None`` for never."""
        if all(pipes.pidfd < 0 for pipes in self._pipes.values()):
            return None
        return max(0.0, self._looked + LOOK_EVERY - time.monotonic())

    def look(self) -> None:
        """Note the memory of adopted processes, which can't be asked for once they have ended."""
        self._looked = time.monotonic()
        for pipes in self._pipes.values():
            if pipes.pidfd >= 0:
                pipes.look()

    def kill(self, pid: int, number: int, group: bool) -> None:
        """Send a signal to one of them, or to its process group."""
        adopted = next((p for p in self._pipes.values() if p.pid == pid and p.pidfd >= 0), None)
        try:
            if adopted is not None:
                adopted.send_signal(number, group)
            else:
                (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:
            return
        except (OSError, OverflowError, ValueError) as error:  # the others that are to get one must get it
            print(f"hvdlab: process {pid} can't be sent signal {number}: {error}", file=sys.stderr)

    def tell_controller(self, line: bytes) -> None:
        """Write to the controller, if there is one."""
        pipes = self._pipes.get(CONTROLLER)
        if pipes is not None and pipes.channel is not None:
            with contextlib.suppress(OSError):
                pipes.channel.send(line)

    def forget(self) -> None:
        """In a forked child: close the pipes of the other children."""
        for pipes in self._pipes.values():
            pipes.close()

    # -- what children write --------------------------------------------------------------------------------------

    def _watch(self, source: object, happened: object) -> None:
        self._selector.register(source, selectors.EVENT_READ, happened)  # type: ignore[arg-type]  # has a descriptor

    def _read_log(self, pipes: ChildPipes) -> list[Event]:
        if self._pipes.get(pipes.number) is not pipes:
            return []  # the child was reaped a moment ago, and its log was read then
        try:
            data = os.read(pipes.log, READ_SIZE)
        except BlockingIOError:
            return []
        if not data:
            self._selector.unregister(pipes.log)
            return []
        return [ChildWrote(pipes.number, data)]

    def _read_controller(self) -> list[Event]:
        pipes = self._pipes.get(CONTROLLER)
        if pipes is None or pipes.channel is None:
            return []
        try:
            said = pipes.channel.recv(READ_SIZE)
        except ConnectionResetError:  # it ended without having read everything
            said = b""
        if not said:
            self._selector.unregister(pipes.channel)
            return []
        return [ControllerListens()]

    # -- ends -----------------------------------------------------------------------------------------------------

    def reap(self) -> list[Event]:
        """Reap children that have ended, adopted orphans of ranks included.

        A thread of an imported package may start processes as well, and wait for them itself.
        """
        events: list[Event] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return events
            if found is None:
                return events
            events += self._reap_one(found.si_pid)

    def _reap_one(self, pid: int) -> list[Event]:
        events: list[Event] = []
        left: bytes | None = None
        pipes = next((pipes for pipes in self._pipes.values() if pipes.pid == pid), None)
        if pipes is not None:
            # What it left behind in its process group (a data loader's workers) ends with it; before it is reaped, no
            # other process can get its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            events, left = self._drain(pipes)
        try:
            _, status, usage = os.wait4(pid, 0)
        except ChildProcessError:
            # Another thread of this process has reaped it between waitid() and this call.
            return [*events, self._ended(pid, None, 0, left)] if pipes is not None else events
        return [*events, self._ended(pid, status, usage.ru_maxrss * 1024, left)]

    def _adopted_ended(self, pipes: ChildPipes) -> list[Event]:
        status = pipes.bury()
        events, left = self._drain(pipes)
        return [*events, self._ended(pipes.pid, status, pipes.peak, left, seen=True)]

    def _ended(
        self, pid: int, status: int | None, max_rss: int, left: bytes | None, seen: bool = False
    ) -> ChildEnded:
        if status is None:
            oom = self._memory.increased()
            return ChildEnded(pid, max_rss=max_rss, out_of_memory=oom, seen=seen, left=left)
        code = os.waitstatus_to_exitcode(status)
        killed = code == -signal.SIGKILL and self._memory.increased()
        return ChildEnded(pid, max(code, -1), max(-code, 0), max_rss, killed, seen, left)

    def _drain(self, pipes: ChildPipes) -> tuple[list[Event], bytes | None]:
        """Read a child's last words, and close its pipes."""
        for source in (pipes.log, pipes.channel, pipes.pidfd):
            if source is not None and source != -1:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(source)
        del self._pipes[pipes.number]
        left = pipes.left(self._program)
        events: list[Event] = [ChildWrote(pipes.number, data) for data in pipes.last_words()]
        pipes.close()
        return events, left

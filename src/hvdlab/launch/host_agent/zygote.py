"""A zygote, as its agent sees it: an interpreter that has imported the ranks' modules, and forks itself to be ranks.

Ranks that are forked by it run the job's command line as newly started ranks do, without the time of imports and
with the memory of the imported modules shared. The agent becomes the ranks' parent, so it watches, signals and reaps them as
those that it started itself. Nothing depends on a zygote: without one, each rank starts an interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.system import die_with_parent
from hvdlab.launch.command import PythonCommand
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.rank_process import Child, RankDescriptors
from hvdlab.launch.processes import describe_signal

LARGEST = 1 << 17
"""Bytes of a message to or from a zygote, at most."""
LARGEST_PID = 1 << 22
"""The highest number that Linux gives a process."""
ENDS_WITHIN = 2.0
"""Seconds that a zygote may take to end after its connection did."""


class ZygoteError(Exception):
    """Error: a zygote is impossible; the message names the reason."""


class Zygote:
    """The process, and the ranks that were ordered from it. Belongs to the agent's one thread.

    Args:
        start: The ranks' command, and the modules that are imported before it.

    Attributes:
        pid: The zygote's process.
        descriptor: Readable when there is something to :meth:`receive`.
        ready: Whether the imports are done; ranks are forked from then on.

    Raises:
        ZygoteError: It can't be started.
    """

    def __init__(self, start: wire.Start) -> None:
        command = PythonCommand.parse(list(map(os.fsdecode, start.command)))
        if command is None:
            raise ZygoteError(f"{os.fsdecode(start.command[0])} is not started as a Python program")
        self._start = start
        self._fault = ""  # its output instead of an answer
        # Packets: with each order the zygote gets the descriptors of one rank, and no other's.
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self.ready = False
        #: Ranks that wait for the imports, and ranks that the zygote was sent and has not answered for; with their pipes.
        self._waiting: list[tuple[wire.RankSpec, RankDescriptors]] = []
        self._ordered: dict[int, tuple[wire.RankSpec, RankDescriptors]] = {}
        #: Signals for ranks that have no process yet.
        self._signals: dict[int, list[int]] = {}
        agent = os.getpid()
        own = [command.interpreter, *command.options, "-m", "hvdlab.launch.host_agent.zygote_process"]
        try:
            self._process = subprocess.Popen(
                [*own, str(theirs.fileno()), str(agent), ",".join(start.preload), "--", *command.words],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
                process_group=0,
                preexec_fn=lambda: die_with_parent(agent),  # noqa: PLW1509  # the agent has one thread
            )
        except (OSError, ValueError) as error:
            self._sock.close()
            why = error.strerror if isinstance(error, OSError) else None
            raise ZygoteError(f"`{command.interpreter}` can't be run: {why or error}") from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.descriptor = self._sock.fileno()

    def fork(self, spec: wire.RankSpec, stdin: int) -> None:
        """Have a rank forked, once the imports are done.

        Args:
            stdin: The rank's standard input, or -1 for none. The caller closes it.

        Raises:
            SpawnError: This process may open no more files.
        """
        self._waiting.append((spec, RankDescriptors.make(self._start.function, stdin)))
        if self.ready:
            self._order()

    def owes(self, rank: int) -> bool:
        """Return whether a rank was ordered that has no process yet."""
        return rank in self._ordered or any(spec.rank == rank for spec, _ in self._waiting)

    def signal(self, rank: int, number: int) -> None:
        """Keep a signal for a rank that has no process yet, if there is one."""
        if self.owes(rank):
            self._signals.setdefault(rank, []).append(number)

    def receive(self) -> list[Child | wire.RankNotStarted | wire.Preloaded] | None:
        """Return the zygote's answers; ``None`` once it has ended. Never blocks.

        One that sends other messages than answers, or answers for a rank that was not ordered, is killed.
        """
        found: list[Child | wire.RankNotStarted | wire.Preloaded] = []
        while True:
            try:
                data = self._sock.recv(LARGEST)
                message = self._checked(wire.decode_from_zygote(data)) if data else None
            except BlockingIOError:
                return found
            except ProtocolError as error:
                self._fault = str(error)
                self._process.kill()
                # The next call finds the end, even if the process has passed its side of the connection on.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
                message = None
            except OSError:
                message = None
            match message:
                case None:
                    return found or None
                case wire.Preloaded():
                    self.ready = True
                    found.append(message)
                case wire.RankStarted(rank, pid):
                    found.append(self._born(rank, pid))
                case wire.RankNotStarted(rank):
                    self._ordered.pop(rank)[1].close()
                    found.append(message)
            # After each of them: the zygote has read the order that it answers, so the socket has room for another one.
            self._order()

    def _checked(self, message: wire.FromZygote) -> wire.FromZygote:
        """Return an answer that is about a rank that was ordered, with a process that can be one.

        Raises:
            ProtocolError: It is not; a signal to such a process could hit any other.
        """
        if not isinstance(message, wire.Preloaded) and message.rank not in self._ordered:
            raise ProtocolError(f"not an answer to any order: {message}")
        if isinstance(message, wire.RankStarted) and not 1 < message.pid <= LARGEST_PID:
            raise ProtocolError(f"not the number of a process: {message}")
        return message

    def unborn(self) -> list[tuple[wire.RankSpec, int]]:
        """Return, after the zygote's end, the ranks that it has not forked, each with its standard input, which the caller closes."""
        left = [*self._waiting, *self._ordered.values()]
        self._waiting, self._ordered = [], {}
        found = []
        for spec, descriptors in left:
            found.append((spec, os.dup(descriptors.stdin)))
            descriptors.close()
        return found

    def why_ended(self) -> str:
        """Return how it ended. Called once it has, or its connection has; reaps it."""
        try:
            code = self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._fault:
            return f"killed because it sent {self._fault}"
        return describe_signal(-code) if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Kill it, if it lives, and forget the ranks that have no process yet."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for _, stdin in self.unborn():
            os.close(stdin)
        self._sock.close()

    def _order(self) -> None:
        """Send the zygote the ranks that wait; those that it can't be sent stay until it has answered, or its end is noticed."""
        while self._waiting:
            spec, descriptors = self._waiting[0]
            try:
                socket.send_fds(self._sock, [wire.encode_payload(wire.Spawn((spec,)))], descriptors.for_rank)
            except OSError as error:
                # A full socket has orders without an answer, and each answer leads here again.
                if isinstance(error, BlockingIOError) and self._ordered:
                    return
                self._process.send_signal(signal.SIGKILL)  # after its end the agent starts all its ranks
                return
            del self._waiting[0]
            self._ordered[spec.rank] = spec, descriptors

    def _born(self, rank: int, pid: int) -> Child:
        _, descriptors = self._ordered.pop(rank)
        child = descriptors.child(rank, pid)
        for number in self._signals.pop(rank, ()):
            child.signal(number)
        return child

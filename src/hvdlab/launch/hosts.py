"""On which hosts ranks run: ``-H a:2,b:2``, host files, and which rank gets which slot."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.system import HostPosition, host_position

LOCALHOST = "localhost"
# A name that began with `-` would be an option of ssh or mpiexec.
_NAME = re.compile(r"\[[0-9A-Fa-f:.]+\]|\w[\w.-]*")
_HOST = re.compile(rf"(?P<name>{_NAME.pattern})(?::(?P<slots>\d+))?\Z")
_SLOTS = re.compile(r"\b(?:slots|cpus?)\s*=\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and how many ranks it accepts."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequestError(f"{self.name!r} is no name of a host.")
        if self.slots < 1:
            raise InvalidRequestError(
                f"{self.slots} ranks on {self.name} were asked for; give each host one at least (-np 1)."
            )


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a rank.

    Attributes:
        rank: Its number.
        host: Index of its host.
        where: Its place on the host and among hosts.
    """

    rank: int
    host: int
    where: HostPosition


def parse_hosts(text: str) -> list[Host]:
    """Parse ``a:4,b`` to hosts; one slot where no number is given.

    Raises:
        InvalidRequestError: The text can't be read as hosts.
    """
    return _merged([_host(piece) for piece in text.split(",") if piece.strip()], text)


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a file: Horovod's ``a slots=4``, Open MPI's (``max_slots`` and the like are ignored), MPICH's ``a:4``.

    Raises:
        InvalidRequestError: The file can't be read, or a line of it is no host.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InvalidRequestError(f"the host file {path} can't be read: {error.strerror}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        name, _, rest = line.partition("#")[0].strip().partition(" ")
        if not name:
            continue
        try:
            host = _host(name)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{path}, line {number}: {error}") from error
        slots = _SLOTS.search(rest)
        hosts.append(Host(host.name, int(slots[1])) if slots else host)
    return _merged(hosts, str(path))


def _host(text: str) -> Host:
    match = _HOST.match(text.strip())
    if match is None:
        raise InvalidRequestError(f"{text!r} is no host; write hosts as `a:4,b:4`.")
    return Host(match["name"], int(match["slots"] or 1))


def _merged(hosts: Sequence[Host], source: str) -> list[Host]:
    """Return the hosts with the slots of those that are named several times added up."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise InvalidRequestError(f"{source!r} names no host; write hosts as `a:4,b:4`.")
    return [Host(name, number) for name, number in slots.items()]


def assign(hosts: Sequence[Host], size: int) -> list[Slot]:
    """Return the slots of ``size`` ranks: hosts are filled one after the other.

    Raises:
        InvalidRequestError: The hosts have too few slots.
    """
    names = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
    if size > len(names):
        raise InvalidRequestError(
            f"-np {size} needs {size} slots, but the hosts have {len(names)}: "
            + ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        )
    taken = names[:size]
    ranks = range(size)
    keys = [str(index) for index in taken]
    return [Slot(rank, taken[rank], host_position(rank, ranks, keys)) for rank in ranks]


def is_local(name: str) -> bool:
    """Return whether this is the host that we are on: by its name, or by one of its addresses."""
    plain = name.strip("[]")
    if plain in (LOCALHOST, "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()):
        return True
    import psutil

    return any(plain == a.address for found in psutil.net_if_addrs().values() for a in found)

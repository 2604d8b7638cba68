"""A coordinator's process under attack: its job continues with any bytes at its ports."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import pytest

from hvdlab.collectives.coordinator.connections import MOST_STRANGERS
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import HELLO_LIMIT, decode_to_peer, encode
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.time_limits import Deadline
from support.fuzz.protocol import KINDS, make, spoil

M = TypeVar("M", bound=m.Message)
DOORS = ("unix", "tls")
SECONDS = 30  # until a wait for the coordinator fails


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess.start(size=2, tcp_host="127.0.0.1") as process:
        yield process


class Job:
    """Two ranks by hand, one at each door, that continue to work beside any acts of strangers."""

    def __init__(self, process: CoordinatorProcess) -> None:
        self._process = process
        self._rounds = 0
        self.endpoints = [self.join(rank, door) for rank, door in enumerate(DOORS)]
        self.generations = [self._next(e, m.Configure).generation for e in self.endpoints]

    def join(self, rank: int, door: str = "unix") -> Endpoint:
        hello = m.Hello(
            m.PROTOCOL_VERSION, self._process.token, "rank", rank, "h", os.getpid(), planes=("gloo",)
        )
        address = self._process.address if door == "unix" else str(self._process.tls_address)
        endpoint, _ = connect(
            address, hello, certificate=self._process.certificate, deadline=Deadline(SECONDS)
        )
        return endpoint

    @staticmethod
    def _next(endpoint: Endpoint, kind: type[M]) -> M:
        while True:
            assert select.select([endpoint], [], [], SECONDS)[0], f"no {kind.__name__} comes"
            for payload in endpoint.receive():
                message = decode_to_peer(payload)
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, m.Abort), message

    def works(self) -> None:
        """Run one collective, in the generation that the job began with."""
        self._rounds += 1
        name = f"t{self._rounds}"
        definition = m.Definition(self._rounds, m.Signature(0, name, 8, 1, (1,)), "")
        for endpoint, generation in zip(self.endpoints, self.generations, strict=True):
            endpoint.send(m.Announce(0, generation, (self._rounds,), (definition,)))
        for endpoint in self.endpoints:
            assert self._next(endpoint, m.Execute).batches == (m.Batch((self._rounds,)),)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture
def job(coordinator: CoordinatorProcess) -> Iterator[Job]:
    made = Job(coordinator)
    yield made
    made.close()


def stranger(process: CoordinatorProcess, door: str) -> socket.socket:
    if door == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(SECONDS)
        sock.connect(process.address.removeprefix("unix:"))
        return sock
    host, _, port = str(process.tls_address).removeprefix("tls:").rpartition(":")
    return socket.create_connection((host, int(port)), SECONDS)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("said", [b"", b"hello"], ids=["nothing said", "something said"])
@pytest.mark.parametrize("door", DOORS)
def test_who_is_gone_before_it_was_accepted(
    coordinator: CoordinatorProcess, job: Job, door: str, said: bytes
) -> None:
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            sock = stranger(coordinator, door)
            sock.sendall(said)
            reset(sock)
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)
    job.works()


@pytest.mark.parametrize("door", DOORS)
def test_strangers_can_not_use_all_descriptors_up(
    coordinator: CoordinatorProcess, job: Job, door: str
) -> None:
    limit = descriptors(coordinator.pid) + 10
    resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (limit, limit))
    silent = [stranger(coordinator, door) for _ in range(40)]
    job.works()
    job.endpoints[0].send(m.Bye())
    job.endpoints[0].close()
    job.endpoints[0] = job.join(0, "tls")  # a client with the token is still admitted
    for sock in silent:
        sock.close()


def test_a_rank_gets_in_behind_a_crowd(coordinator: CoordinatorProcess, job: Job) -> None:
    job.endpoints[0].send(m.Bye())
    job.endpoints[0].close()
    silent = [stranger(coordinator, "tls") for _ in range(MOST_STRANGERS + 40)]
    job.endpoints[0] = job.join(0, "tls")
    for sock in silent:
        sock.close()


def secure(process: CoordinatorProcess) -> socket.socket:
    """Connect as a stranger that completes the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(stranger(process, "tls"))


def garbage(chance: random.Random) -> Iterator[bytes]:
    hello = encode(m.Hello(m.PROTOCOL_VERSION, "guess", "rank", 0))
    yield from (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
        + chance.randbytes(200),  # a handshake that goes wrong
        struct.pack("<I", (1 << 32) - 1),
        struct.pack("<I", HELLO_LIMIT) + chance.randbytes(HELLO_LIMIT - 1),
        hello,
        hello[:-1],
        hello * 3,
        b"\x80\x04\x95\x1e\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",  # a pickle
        chance.randbytes(5000),
    )
    for _ in range(20):
        yield spoil(encode(make(chance.choice(KINDS), chance)), chance)


@pytest.mark.parametrize("door", [*DOORS, "within tls"])
def test_garbage_of_strangers_who_stay(coordinator: CoordinatorProcess, job: Job, door: str) -> None:
    """Some keep their end open, some close half of it, some read nothing."""
    chance = random.Random(1)
    before = descriptors(coordinator.pid)
    opened = []
    for number, data in enumerate(garbage(chance)):
        sock = secure(coordinator) if door == "within tls" else stranger(coordinator, door)
        opened.append(sock)
        # The coordinator closes the connection as soon as it has read enough to refuse it, often before all is sent.
        with contextlib.suppress(OSError):
            for start in range(0, len(data), 1000):
                sock.sendall(data[start : start + 1000])
            if number % 3 == 0 and door != "within tls":
                sock.shutdown(socket.SHUT_WR)
        if number % 7 == 0:
            job.works()
    job.works()
    for sock in opened:
        sock.close()
    until = time.monotonic() + SECONDS
    while descriptors(coordinator.pid) != before:
        assert time.monotonic() < until, "descriptors are kept"
        job.works()


def highest(pid: int) -> int:
    """Return the most memory that a process had, in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10


def test_a_flood_over_tls_is_not_held(coordinator: CoordinatorProcess, job: Job) -> None:
    """A stranger has as much ready as the system takes before the coordinator looks."""
    floods = [secure(coordinator) for _ in range(4)]
    job.works()
    before = highest(coordinator.pid)
    os.kill(coordinator.pid, signal.SIGSTOP)
    try:
        for sock in floods:
            sock.settimeout(0.05)
            # The send ends by its time limit once the buffers of a stopped process are full.
            with contextlib.suppress(OSError):
                sock.sendall(struct.pack("<I", HELLO_LIMIT) + bytes(32 << 20))
    finally:
        os.kill(coordinator.pid, signal.SIGCONT)
    for sock in floods:
        sock.settimeout(SECONDS)
        with contextlib.suppress(OSError):
            assert sock.recv(1) == b""  # a message too long to be a Hello ends the connection
        sock.close()
    job.works()
    grown = highest(coordinator.pid) - before
    assert grown < 3 << 20, grown


def test_who_says_one_byte_at_a_time_holds_nobody_up(coordinator: CoordinatorProcess, job: Job) -> None:
    hello = encode(m.Hello(m.PROTOCOL_VERSION, coordinator.token, "rank", 5))
    slow = [stranger(coordinator, DOORS[number % 2]) for number in range(50)]
    for byte in hello[:20]:
        for sock in slow:
            # The coordinator may have closed some of them by now.
            with contextlib.suppress(OSError):
                sock.sendall(bytes([byte]))
        job.works()
    for sock in slow:
        sock.close()


def test_connections_under_a_number_that_is_taken(coordinator: CoordinatorProcess, job: Job) -> None:
    """They know the token, as a rank does that is started twice; the first one stays, and so does its generation."""
    refusals: list[str] = []

    def again(rank: int, door: str) -> None:
        try:
            job.join(rank, door).close()
        except StartError as error:
            refusals.append(str(error))

    others = [
        threading.Thread(target=again, args=(rank, door))
        for rank in (0, 1)
        for door in DOORS
        for _ in range(5)
    ]
    for thread in others:
        thread.start()
    job.works()
    for thread in others:
        thread.join()
    assert len(refusals) == len(others)
    assert all("is already connected" in text for text in refusals)
    job.works()


def test_a_client_that_sends_garbage_is_dropped_and_nobody_else(
    coordinator: CoordinatorProcess, job: Job
) -> None:
    chance = random.Random(2)
    hello = m.Hello(m.PROTOCOL_VERSION, coordinator.client_token, "client")
    for number in range(20):
        endpoint, _ = connect(coordinator.address, hello, deadline=Deadline(SECONDS))
        noise = chance.randbytes(30) if number % 2 else encode(m.Announce(0, 1, (number,)))[4:]
        endpoint.send_frame(struct.pack("<I", len(noise)) + noise)
        job.works()
        endpoint.close()


def test_a_rank_that_sends_garbage_is_lost_and_only_it(coordinator: CoordinatorProcess, job: Job) -> None:
    job.endpoints[1].send_frame(struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1")
    abort = None
    while abort is None:
        assert select.select([job.endpoints[0]], [], [], SECONDS)[0]
        for payload in job.endpoints[0].receive():
            message = decode_to_peer(payload)
            abort = message if isinstance(message, m.Abort) else abort
    assert (abort.kind, abort.ranks) == ("rank_died", (1,))
    job.endpoints[1].close()
    job.endpoints[1] = job.join(1)

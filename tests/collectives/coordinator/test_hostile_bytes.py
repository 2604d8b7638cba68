"""A coordinator's process under attack: whatever comes to its ports, its job goes on."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterator

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.connect import connect
from hvdlab.collectives.protocol.endpoint import Endpoint

DOORS = ("unix", "tls")
SECONDS = 30


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess.start(size=2, tcp_host="127.0.0.1") as process:
        yield process


class Job:
    """Two ranks by hand, one at each door, that go on working whatever strangers do."""

    def __init__(self, process: CoordinatorProcess) -> None:
        self._process = process
        self._rounds = 0
        self.endpoints = [self.join(rank, door) for rank, door in enumerate(DOORS)]
        self.epochs = [int(self._next(e, m.Configure).epoch) for e in self.endpoints]

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
    def _next(endpoint: Endpoint, kind: type) -> m.Message:
        while True:
            assert select.select([endpoint], [], [], SECONDS)[0], f"no {kind.__name__} comes"
            for payload in endpoint.receive():
                message = decode_to_peer(payload)
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, m.Abort), message

    def works(self) -> None:
        """One collective, in the epoch that the job began with."""
        self._rounds += 1
        name = f"t{self._rounds}"
        definition = m.Definition(self._rounds, m.Signature(0, name, 8, 1, (1,)), "")
        for endpoint, epoch in zip(self.endpoints, self.epochs, strict=True):
            endpoint.send(m.Announce(0, epoch, (self._rounds,), (definition,)))
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
    job.endpoints[0] = job.join(0, "tls")  # somebody who knows the token still gets in
    for sock in silent:
        sock.close()

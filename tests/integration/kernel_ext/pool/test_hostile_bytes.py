"""Strangers at every port that a pool listens on: nothing of theirs is executed, and the pool goes on."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.pool import Pool

StartPool = Callable[..., Pool]

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
KINDS = (zmq.DEALER, zmq.REQ, zmq.SUB, zmq.PUSH, zmq.ROUTER, zmq.PUB)


class Executes:
    """Object that creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str, int]]:
        return os.open, (self._path, os.O_CREAT)


class Output(OutputSink):
    """Sink of a cell's output."""

    def output(self, rank: int, chunks: object) -> None: ...

    def done(self, rank: int, done: object) -> None: ...

    def note(self, text: str, *, warning: bool = False) -> None: ...


def doors() -> dict[tuple[str, int], int]:
    """Return the addresses on which the pool's processes listen, with the process of each."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        # Processes of the pool can end while they are listed.
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.ip, connection.laddr.port] = process.pid
    return found


def noises(chance: random.Random, attack: bytes) -> Iterator[bytes]:
    """Yield bytes of a peer without any protocol, and of one that speaks ZeroMQ's."""
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    yield from (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(5000), attack)
    yield from (GREETING[:30], GREETING, GREETING + chance.randbytes(3000))
    yield GREETING + ready + b"\x02" + struct.pack(">Q", 1 << 62)  # a frame larger than any memory
    yield GREETING + ready + b"\x00" + bytes([len(attack)]) + attack
    for _ in range(10):
        yield GREETING + ready + b"\x01" + chance.randbytes(chance.randrange(300))


def messages(attack: bytes) -> Iterator[list[bytes]]:
    """Yield messages in Jupyter's form, or nearly, with signatures that no key has made."""
    header = b'{"msg_id": "1", "msg_type": "apply_request", "username": "", "session": "", "version": "5.3"}'
    code = b'{"code": "import os", "silent": false}'
    yield from ([b""], [attack], [b"<IDS|MSG>"], [b"<IDS|MSG>", b""], [b"x"] * 50)
    for signature in (b"", b"0" * 64):
        for content in (b"{}", code, attack, b"\xff"):
            yield [b"<IDS|MSG>", signature, header, b"{}", b"{}", content, attack, attack]
            yield [b"0", b"<IDS|MSG>", signature, header, b"{}", b"{}", content, attack]


@pytest.mark.timeout(300)
def test_strangers_at_every_port(start_pool: StartPool, tmp_path: Path) -> None:
    pool = start_pool(2, timeout=120)
    cluster = pool.cluster
    assert cluster is not None
    mark = tmp_path / "executed"
    attack = pickle.dumps(Executes(mark))
    found = doors()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    chance = random.Random(1)
    opened: list[socket.socket] = []
    for door in found:
        for noise in noises(chance, attack):
            # A port may refuse it, or close the connection before all is sent.
            with contextlib.suppress(OSError):
                sock = socket.create_connection(door, 5)
                opened.append(sock)
                sock.sendall(noise)
    assert len(found) >= 10, "the controller's ports are not among them"
    context = zmq.Context()
    try:
        for host, port in found:
            for kind in KINDS:
                with context.socket(kind) as speaker:
                    speaker.linger, speaker.sndtimeo = 200, 50
                    speaker.connect(f"tcp://{host}:{port}")
                    for parts in messages(attack):
                        with contextlib.suppress(zmq.ZMQError):
                            speaker.send_multipart(parts)
        results = pool.run("40 + 2", out=Output(), timeout=60)
        assert list(results) == [42, 42]
    finally:
        context.destroy(linger=0)
        for sock in opened:
            sock.close()
    assert list(pool.run("40 + 2", out=Output(), timeout=60)) == [42, 42]
    assert not mark.exists()
    assert {process.pid for process in psutil.Process().children(recursive=True)} >= before
    client = cluster.connect_client_sync()
    try:
        client.wait_for_engines(2, timeout=60)
        assert client[:].apply_sync(os.getpid) == [status.pid for status in pool.status()]
    finally:
        client.close()
        zmq.Context.instance().destroy(linger=0)

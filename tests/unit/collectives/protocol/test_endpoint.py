"""Endpoints over real sockets: partial writes, descriptors, ends."""

from __future__ import annotations

import array
import contextlib
import os
import resource
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import decode_to_peer, encode
from hvdlab.collectives.protocol.endpoint import (
    DESCRIPTOR_LIMIT,
    LOST,
    TLS_AT_ONCE,
    ConnectionLost,
    Endpoint,
    client_context,
    new_certificate,
    server_context,
)
from hvdlab.collectives.protocol.messages import Mail, Message, Ping
from support.patience import PATIENCE

Pair = tuple[Endpoint, Endpoint]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair()
    sender, receiver = Endpoint(a), Endpoint(b, descriptors=True)
    yield sender, receiver
    sender.close()
    receiver.close()


def receive(endpoint: Endpoint) -> list[Message]:
    assert select.select([endpoint], [], [], 5)[0], "nothing arrives"
    return [decode_to_peer(payload) for payload in endpoint.receive()]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_several_messages_leave_in_one_packet() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender = Endpoint(a)
    with b:
        assert sender.send_all([Ping(1), Ping(2)])
        assert b.recv(1 << 16) == encode(Ping(1)) + encode(Ping(2))
    sender.close()


def test_messages_around_one_that_is_too_large_are_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = pair
    monkeypatch.setattr("hvdlab.collectives.protocol.codec.FRAME_LIMIT", 1000)
    with pytest.raises(ProtocolError):
        sender.send_all([Ping(1), Mail("t", 0, bytes(1001)), Ping(2)])
    assert sender.send_all([Ping(3)])
    assert receive(receiver) == [Ping(1), Ping(2), Ping(3)]


def test_messages_arrive_in_order(pair: Pair) -> None:
    sender, receiver = pair
    assert sender.send(Ping(1))
    assert sender.send(Ping(2))
    assert receive(receiver) == [Ping(1), Ping(2)]


def test_receive_never_blocks(pair: Pair) -> None:
    assert pair[1].receive() == []


def test_what_the_socket_does_not_take_waits_and_is_flushed_in_order(pair: Pair) -> None:
    sender, receiver = pair
    large = Mail("t", 0, bytes(3_000_000))
    assert not sender.send(large)
    assert not sender.send(Ping(2))
    assert sender.backlog > 0
    found: list[Message] = []
    while len(found) < 2:
        found += [decode_to_peer(payload) for payload in receiver.receive()]
        sender.flush()
    assert found == [large, Ping(2)]
    assert sender.backlog == 0
    assert sender.flush()


def test_a_flood_over_tls_is_read_in_pieces(tmp_path: Path) -> None:
    """A stranger's bytes are looked at before more of them are read, however many are there."""
    certificate, key = new_certificate("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    served = server_context(tmp_path, certificate, key).wrap_socket(
        here, server_side=True, do_handshake_on_connect=False
    )
    shaking = threading.Thread(target=served.do_handshake)
    shaking.start()
    stranger = client_context(certificate).wrap_socket(there, server_hostname="127.0.0.1")
    shaking.join()
    stranger.setblocking(False)
    sent = 0
    payload = encode(Mail("x", 0, bytes(1000)))
    # Until the system's buffers are full: the receiver has not read yet.
    with contextlib.suppress(ssl.SSLWantWriteError):
        while sent < 64 << 20:
            sent += stranger.send(payload * 1000)
    assert sent > 4 * TLS_AT_ONCE, "the system's buffers are too small for this test"
    endpoint = Endpoint(served, limit=64 << 10)
    got = 0
    with contextlib.closing(endpoint), contextlib.closing(stranger):
        while got + len(payload) * 2000 < sent:
            assert select.select([endpoint], [], [], PATIENCE)[0], (
                "what is left does not make the socket readable"
            )
            came = sum(map(len, endpoint.receive()))
            assert came <= TLS_AT_ONCE + (64 << 10)
            got += came


def test_a_descriptor_comes_with_its_frame(pair: Pair) -> None:
    sender, receiver = pair
    descriptor = os.memfd_create("x")
    os.write(descriptor, b"shared")
    sender.send(Ping(1))
    sender.send(Ping(2), descriptor)
    os.close(descriptor)
    found: list[Message] = []
    while len(found) < 2:
        found += receive(receiver)
    received = receiver.take_descriptor()
    assert os.pread(received, 6, 0) == b"shared"
    assert not os.get_inheritable(received)
    os.close(received)


def test_a_descriptor_that_has_to_wait_outlives_the_senders_copy(pair: Pair) -> None:
    sender, receiver = pair
    before = open_files()
    while sender.send(Mail("t", 0, bytes(50_000))):
        pass
    descriptor = os.memfd_create("x")
    os.write(descriptor, b"waited")
    sender.send(Ping(9), descriptor)
    os.close(descriptor)
    found: list[Message] = []
    while Ping(9) not in found:
        found += [decode_to_peer(payload) for payload in receiver.receive()]
        sender.flush()
    received = receiver.take_descriptor()
    assert os.pread(received, 6, 0) == b"waited"
    os.close(received)
    assert open_files() == before


def test_a_missing_descriptor_is_a_protocol_error(pair: Pair) -> None:
    with pytest.raises(ProtocolError):
        pair[1].take_descriptor()


def test_a_descriptor_that_there_is_no_number_for_costs_only_itself(pair: Pair) -> None:
    sender, receiver = pair
    descriptor = os.memfd_create("x")
    sender.send(Ping(1), descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
        # Until no descriptor is left.
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert receive(receiver) == [Ping(1)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)
    assert receiver.take_descriptor() == LOST
    sender.send(Ping(2), descriptor)
    os.close(descriptor)
    assert receive(receiver) == [Ping(2)]
    os.close(receiver.take_descriptor())


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    before = open_files()
    a, b = socket.socketpair()
    receiver = Endpoint(b, descriptors=True)
    many = [os.memfd_create(str(i)) for i in range(DESCRIPTOR_LIMIT)]
    for i in range(3):
        a.sendmsg([encode(Ping(i))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", many))])
        receive(receiver)
    for descriptor in many:
        os.close(descriptor)
    assert open_files() == before + 2 + DESCRIPTOR_LIMIT
    receiver.close()
    a.close()
    assert open_files() == before


def test_an_endpoint_that_takes_no_descriptors_gets_none() -> None:
    a, b = socket.socketpair()
    receiver = Endpoint(b)
    before = open_files()
    a.sendmsg([encode(Ping(1))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [a.fileno()]))])
    assert receive(receiver) == [Ping(1)]
    assert open_files() == before
    receiver.close()
    a.close()


def test_end_of_file_comes_after_everything_that_was_sent(pair: Pair) -> None:
    sender, receiver = pair
    sender.send(Ping(1))
    sender.close()
    assert receive(receiver) == [Ping(1)]
    with pytest.raises(ConnectionLost, match=r"closed the connection$"):
        receiver.receive()


def test_end_of_file_in_the_middle_of_a_message_is_told() -> None:
    a, b = socket.socketpair()
    receiver = Endpoint(b)
    a.send(encode(Ping(1))[:-1])
    a.close()
    assert receiver.receive() == []
    with pytest.raises(ConnectionLost, match="middle of a message"):
        receiver.receive()
    receiver.close()


def test_sending_to_a_closed_peer_is_a_lost_connection(pair: Pair) -> None:
    sender, receiver = pair
    receiver.close()
    with pytest.raises(ConnectionLost):
        sender.send(Ping(1))


def test_a_closed_endpoint_sends_nothing(pair: Pair) -> None:
    sender, _ = pair
    sender.close()
    sender.close()
    assert sender.closed
    with pytest.raises(ConnectionLost):
        sender.send(Ping(1))
    with pytest.raises(ConnectionLost):
        sender.flush()


def test_many_threads_can_send_without_mixing_their_frames(pair: Pair) -> None:
    sender, receiver = pair

    def send_some(number: int) -> None:
        for i in range(200):
            sender.send(Mail(str(number), i, bytes(1000)))

    threads = [threading.Thread(target=send_some, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    found: list[Mail] = []
    while len(found) < 800:
        sender.flush()
        for message in receiver.receive():
            mail = decode_to_peer(message)
            assert isinstance(mail, Mail)
            found.append(mail)
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [mail.sender for mail in found if mail.topic == str(number)] == list(range(200))

"""A client's recording, against a real coordinator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.tracing.record_format import CellBeginEvent, clock_domain, encode
from hvdlab.collectives.tracing.recording import Recording
from support.patience import PATIENCE
from support.timeline_traces import START_NS, steps


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess.start(timeout=PATIENCE) as process:
        yield process


@pytest.fixture
def client(coordinator: CoordinatorProcess) -> Iterator[Client]:
    with Client.connect(coordinator.address, coordinator.client_token) as client:
        yield client


@pytest.fixture
def ranks(coordinator: CoordinatorProcess, client: Client) -> Iterator[list[Endpoint]]:
    client.expect([0, 1])
    found = []
    for rank in (0, 1):
        hello = m.Hello(
            m.PROTOCOL_VERSION, coordinator.token, "rank", rank, "h", os.getpid(), planes=("gloo",)
        )
        found.append(connect(coordinator.address, hello, deadline=Deadline(PATIENCE))[0])
    client.wait_for(lambda now: now.complete, PATIENCE)
    yield found
    for endpoint in found:
        endpoint.close()


def wait_until_there(recording: Recording, count: int) -> None:
    deadline = Deadline(PATIENCE)
    while recording.count < count:
        version = recording.version
        if recording.count < count:
            assert recording.wait(version, timeout=deadline.remaining()), f"{recording.count} of {count} rows"


def test_whoever_looks_late_gets_the_history_and_then_the_rest(client: Client, ranks: list[Endpoint]) -> None:
    batches = list(steps(2, 10))
    for rank, batch in batches[:12]:
        ranks[rank].send(m.Events(batch))
    recording = client.recording
    for rank, batch in batches[12:]:
        ranks[rank].send(m.Events(batch))
    wait_until_there(recording, 2 * 10 * 40)
    assert recording is client.recording
    assert (recording.table().groupby("operation").size() == 2).all()
    assert recording.membership.ranks == (0, 1)


def test_cells_are_called_what_users_call_them(client: Client, ranks: list[Endpoint]) -> None:
    recording = client.recording
    client.cell_started("ab12", [0], label="[7]")
    version = recording.version
    ranks[0].send(m.Events(encode(0, [CellBeginEvent("ab12", START_NS)], clock=clock_domain())))
    while not recording.running(0):
        assert recording.wait(version, timeout=10)
        version = recording.version
    assert recording.running(0) == "[7]"


def test_what_was_recorded_stays_when_the_client_is_closed(client: Client, ranks: list[Endpoint]) -> None:
    recording = client.recording
    for rank, batch in steps(2, 2):
        ranks[rank].send(m.Events(batch))
    wait_until_there(recording, 160)
    client.close()
    assert recording.closed
    assert client.recording is recording
    assert len(recording.table()) == 160


def test_a_closed_client_has_an_empty_recording(client: Client) -> None:
    client.close()
    assert client.recording.closed
    assert client.recording.count == 0

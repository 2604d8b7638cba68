"""The engine over TLS, as ranks of other hosts have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import AbortedError, CauseKind, StartError
from hvdlab.collectives.settings import Settings
from support.patience import PATIENCE, without_heartbeat
from support.ranks.resident import Ranks


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    without_heartbeat(monkeypatch)
    with Ranks(3, tls=True, env={"HVDLAB_PLANE": "gloo"}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def coordinator() -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess.start(size=1, tcp_host="127.0.0.1", timeout=PATIENCE) as process:
        yield process


def settings(coordinator: CoordinatorProcess) -> Settings:
    return Settings(
        coordinator.tls_address, coordinator.token, 0, certificate=coordinator.certificate, plane="local"
    )


# -- on the ranks -------------------------------------------------------------------------------------------------


def every_operation() -> str:
    """Send small and large tensors through all collectives; return the plane."""
    engine = context.engine()
    rank, size = engine.rank, engine.size
    assert engine.settings.coordinator is not None
    assert engine.settings.coordinator.startswith("tls:")
    for count in (1, 1024, 1025, 1 << 18):
        x = np.full(count, rank + 1, np.float32)
        assert (hvd.allreduce(x, op=hvd.Sum) == size * (size + 1) / 2).all()
        assert (hvd.broadcast(x, 1) == 2).all()
    rows = hvd.allgather(np.full((rank + 1, 2), rank, np.int32))
    assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert (hvd.reducescatter(np.ones((5, 7), np.float64), op=hvd.Sum) == size).all()
    received, splits = hvd.alltoall(np.full(size, rank), np.ones(size, np.int32))
    assert received.tolist() == list(range(size))
    assert splits == (1,) * size
    hvd.barrier()
    operations = [hvd.allreduce_async(np.full(9, i), f"t{i}", op=hvd.Sum) for i in range(500)]
    for i, operation in enumerate(operations):
        assert (hvd.synchronize(operation) == size * i).all()
    return engine.plane()


def total(value: float) -> float:
    return float(hvd.allreduce(np.full(100_000, value), "total", op=hvd.Sum)[0])


def wait_for_the_dead() -> None:
    operation = hvd.allreduce_async(np.ones(4), "w")
    context.engine().flush()
    context.engine().post("waiting", b"")
    hvd.synchronize(operation)


# -- tests ----------------------------------------------------------------------------------------------------------


def test_every_collective_works(three: Ranks) -> None:
    assert three.run(every_operation, timeout=60) == ["gloo"] * 3


def test_survivors_of_a_death_go_on(three: Ranks) -> None:
    assert three.run(total, 1.0) == [3.0] * 3
    client = Client.connect(three.coordinator.address, three.coordinator.client_token)
    told: SimpleQueue[int] = SimpleQueue()
    client.on_mail("waiting", lambda sender, body: told.put(sender))
    try:
        waiting = three.start(wait_for_the_dead, ranks=[0, 2])
        # A collective that both submit after the death needs no other rank.
        assert {told.get(timeout=PATIENCE), told.get(timeout=PATIENCE)} == {0, 2}
        three.kill(1)
        errors = waiting.outcomes(PATIENCE)
        deaths = client.wait_for(lambda membership: bool(membership.deaths), PATIENCE).deaths
    finally:
        client.close()
    for error in errors:
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_DIED
        assert error.cause.ranks == (1,)
    assert [death.rank for death in deaths] == [1]
    assert three.run(total, 1.0, ranks=[0, 2]) == [2.0] * 2


def test_the_wrong_token_is_refused(coordinator: CoordinatorProcess) -> None:
    with pytest.raises(StartError, match="token is wrong"):
        Engine.connect(replace(settings(coordinator), token="0" * 64), timeout=PATIENCE)
    still_works(coordinator)


def test_the_wrong_certificate_is_refused_before_the_token_is_shown(coordinator: CoordinatorProcess) -> None:
    with CoordinatorProcess.start(size=1, tcp_host="127.0.0.1", timeout=PATIENCE) as other:
        wrong = replace(settings(coordinator), certificate=other.certificate)
    with pytest.raises(StartError, match="certificate"):
        Engine.connect(wrong, timeout=PATIENCE)
    with pytest.raises(StartError, match="HVDLAB_CERT"):
        Engine.connect(replace(wrong, certificate=None), timeout=PATIENCE)
    with pytest.raises(StartError, match="no PEM certificate"):
        Engine.connect(replace(wrong, certificate="rubbish"), timeout=PATIENCE)
    still_works(coordinator)


def still_works(coordinator: CoordinatorProcess) -> None:
    engine = Engine.connect(settings(coordinator), timeout=PATIENCE)
    try:
        engine.wait_for_world(PATIENCE)
        assert engine.size == 1
    finally:
        engine.close()

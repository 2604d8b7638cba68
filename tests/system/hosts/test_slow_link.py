"""A host behind a slow cable: everything is right, no rank is taken for dead, and the late rank is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hvdlab.numpy as hvd
from support.network import namespaces as hosts
from support.network.namespaces import Network, SlowLink
from support.patience import eventually
from support.ranks.on_hosts import RanksOnHosts

if hosts.slow_missing():
    pytest.skip(hosts.slow_missing(), allow_module_level=True)

DELAY, RATE = 0.02, 10e6
DEAD_AFTER = 3.0  # seconds of silence after which a host is lost: shorter than one transfer


pytestmark = pytest.mark.alone  # a delay is only visible where it is the only one


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "coordinator"
    file.touch()
    return file


@pytest.fixture(scope="module", params=["gloo", "auto"])
def ranks(request: pytest.FixtureRequest, log: Path) -> Iterator[RanksOnHosts]:
    env = {
        "HVDLAB_PLANE": request.param,
        "HVDLAB_PING_AFTER": "0.5",
        "HVDLAB_DEAD_AFTER": str(DEAD_AFTER),
        "HVDLAB_COORDINATOR_LOG": str(log),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    }
    with Network(2, {1: SlowLink(DELAY, RATE)}) as network, RanksOnHosts(network, env=env) as made:
        yield made


def small() -> float:
    """Return seconds that one small allreduce takes."""
    hvd.allreduce(np.ones(2), op=hvd.Sum)
    begin = time.monotonic()
    for _ in range(5):
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [4.0, 4.0]
    return (time.monotonic() - begin) / 5


def large(count: int) -> float:
    begin = time.monotonic()
    assert (hvd.allreduce(np.ones(count, np.float32), op=hvd.Sum) == 4).all()
    return time.monotonic() - begin


def total() -> float:
    return float(hvd.allreduce(np.ones(3), "late", op=hvd.Sum)[0])


def test_the_delay_is_felt(ranks: RanksOnHosts) -> None:
    assert min(ranks.run(small, timeout=60)) > 2 * DELAY


def test_a_transfer_longer_than_a_heartbeat_is_no_death(ranks: RanksOnHosts, log: Path) -> None:
    count = int(
        1.5 * DEAD_AFTER * RATE / 8 / 4
    )  # elements of four bytes that the cable carries in 1.5 times as long
    seconds = ranks.run(large, count, timeout=100)
    assert min(seconds) > DEAD_AFTER
    assert "is dead" not in log.read_text()


def test_who_is_late_is_named(ranks: RanksOnHosts, log: Path) -> None:
    said = len(log.read_text())
    waiting = ranks.start(total, ranks=[0, 1, 2])
    eventually(
        lambda: "submitted by ranks 0-2, missing ranks 3" in log.read_text()[said:],
        lambda: log.read_text()[said:],
    )
    assert ranks.run(total, ranks=[3]) == [4.0]
    assert waiting.results() == [4.0] * 3

"""Which of a host's addresses carries the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives.errors import InvalidRequestError
from support.network.namespaces import Network
from support.ranks.on_hosts import RanksOnHosts, initialize
from support.ranks.resident import RankFailed


@pytest.fixture(scope="module")
def with_two_networks(network: Network) -> Network:
    for number, host in enumerate(network.hosts):
        host.run("ip", "address", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
    return network


def total() -> float:
    return float(hvd.allreduce(np.ones(100_000), op=hvd.Sum)[0])


@pytest.mark.parametrize(
    ("env", "prefix"),
    [
        ({}, "10.77.0"),
        ({"HOROVOD_GLOO_IFACE": "ib0,eth0"}, "10.77.0"),
        ({"HVDLAB_ADDRESS": "10.78.0.0/24"}, "10.78.0"),
        (lambda number: {"HVDLAB_ADDRESS": f"10.78.0.{number + 1}"}, "10.78.0"),
    ],
    ids=["by default", "interface", "network", "address"],
)
def test_data_goes_over_the_chosen_network(
    with_two_networks: Network, env: Mapping[str, str] | Callable[[int], Mapping[str, str]], prefix: str
) -> None:
    network = with_two_networks
    with RanksOnHosts(network, 1, env=env) as ranks:
        assert ranks.run(total, timeout=60) == [2.0] * 2
        for number, host in enumerate(network.hosts):
            listening = {line.split()[3].rpartition(":")[0] for line in host.run("ss", "-Hltn").splitlines()}
            assert listening == {f"{prefix}.{number + 1}"}


def test_an_interface_that_is_not_there_is_named(network: Network) -> None:
    with RanksOnHosts(network, 1, init=False, env={"HOROVOD_GLOO_IFACE": "ib0"}) as ranks:
        with pytest.raises(RankFailed) as caught:
            ranks.run(initialize, timeout=60)
        for number, error in caught.value.errors.items():
            assert isinstance(error, InvalidRequestError)
            assert f"(host{number}), which has: lo 127.0.0.1, eth0 10.77.0.{number + 1}" in str(error)

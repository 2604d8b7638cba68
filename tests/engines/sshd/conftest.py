"""Tests by real ssh, between hosts made of namespaces. They are collected where they are named, as by ``make engines``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.debian_packages import Unavailable
from support.clusters.sshd import serving
from support.network import namespaces as hosts
from support.network.namespaces import Network

collect_ignore_glob = [] if any("engines/sshd" in word for word in sys.argv) else ["test_*.py"]

CACHE = Path(__file__).parents[3] / "out/engines/sshd"


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Yield two hosts."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture(scope="session")
def ssh(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the command that reaches the second host, on which sshd runs, from the first."""
    try:
        with serving(network.hosts[1], CACHE, tmp_path_factory.mktemp("sshd")) as command:
            yield command
    except Unavailable as error:
        pytest.skip(str(error))

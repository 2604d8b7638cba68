"""Data over Gloo can be read between hosts, and can't where it goes through a tunnel: as the how-to describes, with its
variables."""

from __future__ import annotations

import json
import secrets
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.network.namespaces import Host, Network
from support.patience import PATIENCE

TESTS = Path(__file__).parents[2]
PORT = "29640"
GRADIENT = 1.23456789  # its bytes, four times over, are searched for on the wire
#: Four elements of the gradient of a rank, as they lie in memory.
PATTERN = (struct.pack("<d", GRADIENT) * 4).hex()
TRAIN = f"""\
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
engine = context.init()
total = hvd.allreduce(np.full(1000, {GRADIENT} if engine.rank == 0 else 1.0), op=hvd.Sum)
print(engine.plane(), round(float(total[0]), 6), flush=True)
"""


@contextmanager
def helper(host: Host, script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a helper that reports when it is up, and ends with its input."""
    process = host.popen(
        [sys.executable, str(TESTS / script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(PATIENCE)
        process.stdout.close()


@pytest.fixture
def tunnel(network: Network) -> Iterator[None]:
    first, second = network.hosts
    key = secrets.token_hex(32)
    with (
        helper(first, "support/network/tunnel.py", "10.8.0.1/24", second.address, "51820", key),
        helper(second, "support/network/tunnel.py", "10.8.0.2/24", first.address, "51820", key),
    ):
        yield


def train(network: Network, given: dict[str, str]) -> tuple[list[tuple[int, str]], bool]:
    """Exit codes and output of a rank on each host, and whether the gradient was seen on the first host's cable."""
    common = {
        "MASTER_ADDR": network.hosts[0].address,
        "MASTER_PORT": PORT,
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        **given,
    }
    with helper(network.hosts[0], "support/network/sniffer.py", "eth0", PATTERN) as sniffer:
        ranks = [
            host.popen(
                [sys.executable, "-c", TRAIN],
                {**common, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, host in enumerate(network.hosts)
        ]
        ended = [(process, *process.communicate(timeout=120)) for process in ranks]
        assert sniffer.stdin is not None
        assert sniffer.stdout is not None
        sniffer.stdin.close()
        (seen,) = json.loads(sniffer.stdout.readline())
    return [(process.returncode, (out or err[-600:]).decode()) for process, out, err in ended], seen


TRAINED = [(0, f"gloo {GRADIENT + 1:.6f}\n")] * 2


def test_without_a_tunnel_a_gradient_is_seen_on_the_way(network: Network) -> None:
    assert train(network, {}) == (TRAINED, True)


def test_through_a_tunnel_it_is_not(network: Network, tunnel: None) -> None:
    given = {
        "HVDLAB_TOKEN": secrets.token_hex(16),
        "HVDLAB_ADDRESS": "10.8.0.0/24",
        "HVDLAB_REQUIRE_ENCRYPTION": "10.8.0.0/24",
    }
    assert train(network, given) == (TRAINED, False)


def test_past_the_tunnel_nothing_goes_that_must_not(network: Network, tunnel: None) -> None:
    given = {
        "HVDLAB_TOKEN": secrets.token_hex(16),
        "HVDLAB_REQUIRE_ENCRYPTION": "10.8.0.0/24",
        "HVDLAB_START_TIMEOUT": "5",  # which rank 0 waits for the other one, in vain
    }
    ended, seen = train(network, given)
    assert [code for code, _ in ended] == [1, 1]
    assert not seen

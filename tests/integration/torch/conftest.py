"""Worlds of 1, 2 and 4 resident ranks for the tests of the torch binding."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks


def _world(size: int) -> Iterator[Ranks]:
    with Ranks(size, imports=["hvdlab.torch"]) as world:
        yield world


@pytest.fixture(scope="session", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Yield a world of 1, 2 or 4 ranks, which ends when no further test uses a world of that size."""
    yield from _world(request.param)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from _world(4)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _world(2)


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only rank. Its random numbers are the same in each test, so that none fails by a rare
    value."""
    torch.manual_seed(0)
    for name in [name for name in os.environ if name.startswith(("HVDLAB_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    hvd.init()
    yield
    hvd.shutdown()

"""End of the rendezvous: all ranks wait until rank 0 has closed its store."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives import context
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.rendezvous.backends import TcpStoreBackend
from hvdlab.collectives.rendezvous.discovery import DiscoveredWorld
from support.engine_probe import EngineProbe
from support.patience import eventually
from support.ranks.resident import Ranks


@pytest.fixture
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def generation() -> int:
    return EngineProbe(context.engine()).locked.state.sets[0].generation  # type: ignore[no-any-return]  # a probe is untyped


def complete() -> None:
    """Complete a world whose rank 0 serves the store, which is closed already."""
    engine = context.engine()
    backend: Any = object.__new__(TcpStoreBackend)
    backend.of_rank_0, backend._published, backend._store = True, False, None
    launched: Any = SimpleNamespace(rank=engine.rank)
    info: Any = None
    DiscoveredWorld(launched, info, "", backend, None).complete(engine)


def change_over(before: int) -> None:
    """Let the next generation begin in order, as where shared memory could not be received."""
    engine = context.engine()
    if engine.rank == 0:
        EngineProbe(engine).handlers.send(m.Renew(0, before))
    eventually(lambda: generation() > before)


def test_rank_that_completes_in_a_later_generation_finds_the_end(two: Ranks) -> None:
    (before, _) = two.run(generation)
    two.run(complete, ranks=[0])
    two.run(change_over, before)
    two.run(complete, ranks=[1])

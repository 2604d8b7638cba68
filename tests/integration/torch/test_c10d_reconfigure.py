"""torch's interface for the repair of groups, on hvdlab's groups, and on torch's ``gloo`` where this torch has it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlab.torch as hvd
from hvdlab.collectives.errors import AbortedError, InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.gloo import connections
from hvdlab.torch.c10d import reconfigure
from support.ranks.resident import Ranks

has_interface = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this torch has no interface for it"
)


@pytest.fixture
def world() -> Iterator[Ranks]:
    with Ranks(2, init=False, imports=["hvdlab.torch"]) as ranks:
        yield ranks


def _own_group() -> list[float]:
    dist.init_process_group("hvdlab")
    group: Any = dist.group.WORLD
    assert group.supports_reconfigure
    handles = hvd.allgather_object(group.get_reconfigure_handle())
    assert len(set(handles)) == 2
    group.reconfigure(SimpleNamespace(uuid=1, handles=handles)).wait()
    group.reconfigure(SimpleNamespace(uuid=2, handles=set(handles))).wait()
    for others in (handles[:1], handles[::-1], [*handles, "hvdlab:other:2"]):
        with pytest.raises(InvalidRequestError, match="keeps its 2 ranks and their order"):
            group.reconfigure(SimpleNamespace(uuid=3, handles=others))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return list(tensor.tolist())


def test_an_own_group_goes_on_with_its_ranks(world: Ranks) -> None:
    assert world.run(_own_group, timeout=60) == [[2.0, 2.0]] * 2


def _without_interface() -> None:
    dist.init_process_group("hvdlab")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "_reconfigure", raising=False)
        with pytest.raises(UnsupportedError, match=r"begins with torch 2\.14"):
            reconfigure()


def test_an_older_torch_is_named(world: Ranks) -> None:
    world.run(_without_interface, timeout=60)


def _summed(group: Any) -> list[float]:
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    return list(tensor.tolist())


def _repaired() -> list[list[float]]:
    """Sum before and after all connections of this process's Gloo have ended."""
    dist.init_process_group("gloo", enable_reconfigure=True)  # type: ignore[call-arg]  # from torch 2.14 on
    group: Any = dist.group.WORLD
    assert reconfigure() == (0, 1)
    found = [_summed(group)]
    hvd.barrier()
    for end, _, _ in connections():
        if end.family == socket.AF_INET:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RuntimeError):
        _summed(group)
    assert reconfigure() == (0, 1)
    return [*found, _summed(group)]


@has_interface
def test_a_group_of_gloo_whose_connections_have_ended_is_repaired(world: Ranks) -> None:
    assert world.run(_repaired, timeout=60) == [[[2.0, 2.0], [2.0, 2.0]]] * 2


def _survived() -> tuple[tuple[int, ...], int, int, list[float]]:
    """Go on without the last rank, which ends in the middle of it."""
    # Gloo ends the waits of ranks beside the dead one only. The others wait for those, which have left, until the limit.
    limit = timedelta(seconds=5)
    dist.init_process_group("gloo", timeout=limit, enable_reconfigure=True)  # type: ignore[call-arg]  # from torch 2.14 on
    group: Any = dist.group.WORLD
    reconfigure()
    assert _summed(group) == [3.0, 3.0]
    if hvd.rank() == 2:
        os._exit(7)
    with pytest.raises(RuntimeError):
        _summed(group)
    while hvd.size() > 2:  # until the coordinator has seen it, too
        with contextlib.suppress(AbortedError):
            hvd.barrier()
    ranks = reconfigure()
    return ranks, group.rank(), group.size(), _summed(group)


@has_interface
def test_a_group_of_gloo_goes_on_without_a_rank_that_has_died() -> None:
    with Ranks(3, init=False, imports=["hvdlab.torch"]) as ranks:
        first, second, _ = ranks.outcomes(_survived, timeout=60)
        assert first == ((0, 1), 0, 2, [2.0, 2.0])
        assert second == ((0, 1), 1, 2, [2.0, 2.0])

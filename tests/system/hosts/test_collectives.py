"""Ranks on two hosts: all collectives over the network, places, addresses."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.rendezvous.backends import TcpStoreBackend
from support.network.namespaces import Network
from support.ranks.on_hosts import RanksOnHosts

PLANES = {"gloo": "gloo", "auto": "hierarchical"}
"""What is asked for, and what the ranks get."""


@pytest.fixture(scope="module", params=PLANES)
def ranks(request: pytest.FixtureRequest, network: Network) -> Iterator[RanksOnHosts]:
    with RanksOnHosts(network, env={"HVDLAB_PLANE": request.param}) as made:
        yield made


# -- on the ranks -------------------------------------------------------------------------------------------------


def place() -> tuple[int, ...]:
    e = context.engine()
    return e.rank, e.size, e.local_rank, e.local_size, e.cross_rank, e.cross_size


def reductions() -> str:
    rank, size = context.engine().rank, context.engine().size
    for dtype in (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8):
        for count in (1, 7, 1024, 100_003):
            x = np.full(count, rank + 1, dtype)
            assert (hvd.allreduce(x, op=hvd.Sum) == size * (size + 1) // 2).all()
            assert (hvd.allreduce(x, op=hvd.Max) == size).all()
            assert (hvd.allreduce(x, op=hvd.Min) == 1).all()
    assert (hvd.allreduce(np.full(5, float(rank)), op=hvd.Average) == (size - 1) / 2).all()
    scattered = hvd.reducescatter(np.tile(np.arange(9.0)[:, None], (1, 3)), op=hvd.Sum)
    whole = hvd.allgather(scattered)
    assert (whole == size * np.arange(9.0)[:, None]).all()
    return context.engine().plane()


def movements() -> None:
    rank, size = context.engine().rank, context.engine().size
    for root in range(size):
        assert (hvd.broadcast(np.full((3, 50_000), rank), root) == root).all()
    rows = hvd.allgather(np.full((rank, 2), rank, np.int32))
    assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    splits = list(range(size))
    received, sizes = hvd.alltoall(np.repeat(np.arange(size), splits) * 10 + rank, splits)
    assert received.tolist() == [rank * 10 + sender for sender in range(size) for _ in range(rank)]
    assert sizes == (rank,) * size
    hvd.barrier()


def many_at_once() -> None:
    size = context.engine().size
    operations = [hvd.allreduce_async(np.full(9, i), f"t{i}", op=hvd.Sum) for i in range(300)]
    for i, operation in enumerate(operations):
        assert (hvd.synchronize(operation) == size * i).all()


def of_a_set(members: list[int]) -> float:
    """A process set of ranks on both hosts."""
    e = context.engine()
    chosen = e.add_process_set(members)
    try:
        return (
            float(hvd.allreduce(np.full(3, e.rank + 1.0), op=hvd.Sum, process_set=chosen)[0])
            if e.rank in members
            else 0.0
        )
    finally:
        hvd.barrier()
        e.remove_process_set(chosen)


def again() -> tuple[int, ...]:
    for _ in range(3):
        context.shutdown()
        context.init()
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [context.engine().size] * 2
    return place()


# -- tests ----------------------------------------------------------------------------------------------------------


def test_places_among_ranks_and_hosts(ranks: RanksOnHosts) -> None:
    assert ranks.run(place) == [
        (0, 4, 0, 2, 0, 2),
        (1, 4, 1, 2, 0, 2),
        (2, 4, 0, 2, 1, 2),
        (3, 4, 1, 2, 1, 2),
    ]


def test_reductions(ranks: RanksOnHosts, request: pytest.FixtureRequest) -> None:
    plane = PLANES[request.node.callspec.params["ranks"]]
    assert ranks.run(reductions, timeout=90) == [plane] * 4


def test_movements(ranks: RanksOnHosts) -> None:
    ranks.run(movements, timeout=60)


def test_many_at_once(ranks: RanksOnHosts) -> None:
    ranks.run(many_at_once, timeout=60)


def test_a_process_set_between_hosts(ranks: RanksOnHosts) -> None:
    assert ranks.run(of_a_set, [1, 2], timeout=60) == [0.0, 5.0, 5.0, 0.0]


def test_sockets_are_open_to_one_network_only(ranks: RanksOnHosts) -> None:
    ranks.run(many_at_once, timeout=60)  # the plane is there
    for host in ranks.network.hosts:
        lines = host.run("ss", "-Hltn").splitlines()
        listening = {line.split()[3].rpartition(":")[0] for line in lines}
        assert listening == {host.address}, lines
        between = [line.split()[3:5] for line in host.run("ss", "-Htn", "state", "established").splitlines()]
        assert all(re.match(r"10\.77\.", end) for ends in between for end in ends[-2:]), between


def test_shutting_down_and_initializing_again(ranks: RanksOnHosts) -> None:
    assert [p[:2] for p in ranks.run(again, timeout=90)] == [(r, 4) for r in range(4)]


# -- with torch.distributed beside ----------------------------------------------------------------------------------


def torch_after() -> list[float]:
    context.init()
    return beside()


def torch_while_rank_0_closes_its_store() -> list[float]:
    """Rank 0 takes its time between the moment when all are there and the end of its store."""
    if os.environ["RANK"] == "0":
        close = TcpStoreBackend.close

        def close_later(self: TcpStoreBackend) -> None:
            time.sleep(1)
            close(self)

        TcpStoreBackend.close = close_later  # type: ignore[method-assign]
    context.init()
    return beside()


def torch_before() -> list[float]:
    dist.init_process_group("gloo")
    context.init()
    return beside()


def beside() -> list[float]:
    """Both at work; torch's rendezvous uses MASTER_PORT, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return [float(tensor[0]), float(hvd.allreduce(np.ones(3), op=hvd.Sum)[0])]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("function", [torch_after, torch_while_rank_0_closes_its_store, torch_before])
def test_torch_distributed_uses_the_same_port(network: Network, function: Callable[[], list[float]]) -> None:
    with RanksOnHosts(network, 1, init=False, env={"GLOO_SOCKET_IFNAME": "eth0"}) as ranks:
        assert ranks.run(function, timeout=90) == [[2.0, 2.0]] * 2

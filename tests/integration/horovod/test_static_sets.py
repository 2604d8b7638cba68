"""Process sets that are given to ``hvd.init()``: every collective in each of them, and a second world after the first."""

from __future__ import annotations

from typing import Any

import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks

RANKS = [[0, 2], [1, 3], [0, 1, 2, 3], [0], [0, 1]]


def _everything(process_set: hvd.ProcessSet) -> dict[str, Any]:
    members, mine = process_set.ranks, torch.tensor([hvd.rank()])
    count = torch.ones(len(members), dtype=torch.int32)
    exchanged, received = hvd.alltoall(mine.expand(len(members)), splits=count, process_set=process_set)
    grouped = hvd.grouped_allreduce([torch.ones(1)] * 3, op=hvd.Sum, process_set=process_set)
    scattered = hvd.reducescatter(torch.ones(len(members)), op=hvd.Sum, process_set=process_set)
    hvd.barrier(process_set=process_set)
    return {
        "ranks": members,
        "allreduce": hvd.allreduce(mine, op=hvd.Sum, name="x", process_set=process_set).item(),
        "allgather": hvd.allgather(mine, name="x", process_set=process_set).tolist(),
        "broadcast": hvd.broadcast(mine, members[-1], name="x", process_set=process_set).item(),
        "alltoall": (exchanged.tolist(), received.tolist()),
        "grouped": [part.item() for part in grouped],
        "reducescatter": scattered.tolist(),
        "objects": hvd.allgather_object(hvd.rank(), process_set=process_set),
        "object": hvd.broadcast_object(hvd.rank(), members[0], process_set=process_set),
    }


def _two_worlds() -> list[Any]:
    sets = [hvd.ProcessSet(list(reversed(ranks))) for ranks in RANKS]
    found: list[Any] = []
    for _ in range(2):
        hvd.init(process_sets=sets)
        found.append([s.process_set_id for s in sets])
        found.append([s.rank() for s in sets])
        found.append([_everything(s) if s.included() else None for s in sets])
        hvd.shutdown()
        found.append([s.process_set_id for s in sets])
    return found


def test_process_sets_given_to_init() -> None:
    with Ranks(4, init=False, imports=["hvdlab.torch"]) as world:
        for rank, found in enumerate(world.run(_two_worlds, timeout=100)):
            assert found[:4] == found[4:]
            ids, places, outcomes, after = found[:4]
            assert len(set(ids)) == len(RANKS)
            assert after == [None] * len(RANKS)
            for members, place, outcome in zip(RANKS, places, outcomes, strict=True):
                assert place == (members.index(rank) if rank in members else None)
                if rank not in members:
                    assert outcome is None
                    continue
                size = len(members)
                assert outcome == {
                    "ranks": members,
                    "allreduce": sum(members),
                    "allgather": members,
                    "broadcast": members[-1],
                    "alltoall": (members, [1] * size),
                    "grouped": [float(size)] * 3,
                    "reducescatter": [float(size)],
                    "objects": members,
                    "object": members[0],
                }

"""A worker of a store on servers is cut off, counts as dead, and comes back: the same process, with its memory and its store."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.bindings.elastic.handlers import HandlerRegistry
from hvdlab.bindings.elastic.state import HandledState
from hvdlab.collectives import api, context
from hvdlab.collectives.elastic import run_fn
from patience import PATIENCE
from ranks import Ranks

SERVERS = {"HVDLAB_KV_UPDATE": "servers", "HVDLAB_KV_SERVERS": "2", "MXNET_KVSTORE_BIGARRAY_BOUND": "20"}
"""Each of two servers has a part of the value."""
SIZE = 50
MORE = 3
"""Steps with the worker that is back."""

# -- on the ranks -----------------------------------------------------------------------------------------------------


def cut() -> None:
    """End this rank's connection to the coordinator under both ends."""
    with socket.socket(fileno=os.dup(context.engine()._endpoint.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def train(name: str, cut_rank: int) -> tuple[list[int], list[float], bytes]:
    """Train until the worker that was cut off has taken part for some steps again.

    Returns:
        How many workers there were at the beginning of each attempt; by how much the value grew in each of the steps with the worker
        that is back; and the value in the end.
    """
    store = kvstore.create(name)
    store.set_optimizer(kvstore.optimizer.SGD(learning_rate=-1.0))
    store.init("w", np.zeros(SIZE, np.float32))
    begun: list[int] = []
    grown: list[float] = []
    mine = context.engine().rank == cut_rank
    value = np.empty(SIZE, np.float32)

    def steps(state: HandledState) -> None:
        begun.append(context.engine().size)
        grown.clear()
        while len(grown) < MORE:
            if state.batch == 2 and len(begun) == 1 and mine:
                cut()
            api.barrier()  # all have pulled
            store.pull("w", out=value)
            before = value.copy()
            api.barrier()
            store.push("w", np.ones(SIZE, np.float32))
            store.pull("w", out=value)
            api.barrier()  # all have pushed
            store.pull("w", out=value)
            assert len(set((value - before).tolist())) == 1, "both parts of the value have the same pushes"
            back = api.allreduce(np.array([float(mine and len(begun) > 1)]), "back", op=api.Max)[0]
            if back:
                grown.append(float(value[0] - before[0]))
            state.batch += 1
            state.commit()

    run_fn(steps, lambda: None)(HandledState(HandlerRegistry([]), batch=0))
    store.barrier()
    return begun, grown, value.tobytes()


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("cut_rank", [0, 2])
def test_a_worker_that_was_cut_off_takes_part_again(name: str, cut_rank: int) -> None:
    with Ranks(3, env=SERVERS) as ranks:
        found = ranks.run(train, name, cut_rank, timeout=PATIENCE)
    for begun, grown, value in found:
        assert begun[-1] == 3
        assert grown == [3.0] * MORE
        assert value == found[0][2]
    assert len(found[cut_rank][0]) > 1

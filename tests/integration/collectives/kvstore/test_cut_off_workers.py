"""A worker of a store on servers is cut off, counts as dead, and comes back: the same process, with its memory and its store."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab import kvstore
from hvdlab.bindings.elastic_state import HandledState, HandlerRegistry
from hvdlab.collectives import context, process_sets
from hvdlab.collectives.elastic import run_fn
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks

SERVERS = {"HVDLAB_KV_SERVERS": "2", "MXNET_KVSTORE_BIGARRAY_BOUND": "20"}
"""Each of two servers has a part of the value."""
SIZE = 50
SOME = (0, 2, 3)
"""The workers of a store of a process set."""
MORE = 3
"""Steps with the worker that is back."""

# -- on the ranks -----------------------------------------------------------------------------------------------------


def cut() -> None:
    """End this rank's connection to the coordinator under both ends."""
    with socket.socket(fileno=os.dup(EngineProbe(context.engine()).endpoint.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def train(cut_rank: int) -> tuple[list[int], list[float], bytes]:
    """Train until the worker that was cut off has taken part for some steps again.

    Returns:
        How many workers there were at the beginning of each attempt; by how much the value grew in each of the steps with the worker
        that is back; and the value in the end.
    """
    store = kvstore.create("dist_async")
    store.set_optimizer(kvstore.optimizer.SGD(learning_rate=-1.0))
    store.init("w", np.zeros(SIZE, np.float32))
    begun: list[int] = []
    grown: list[float] = []
    mine = context.engine().rank == cut_rank
    value = np.empty(SIZE, np.float32)

    def steps(state: Any) -> None:
        begun.append(context.engine().size)
        grown.clear()
        while len(grown) < MORE:
            if state.batch == 2 and len(begun) == 1 and mine:
                cut()
            hvd.barrier()  # all have pulled
            store.pull("w", out=value)
            before = value.copy()
            hvd.barrier()
            store.push("w", np.ones(SIZE, np.float32))
            store.pull("w", out=value)
            hvd.barrier()  # all have pushed
            store.pull("w", out=value)
            assert len(set((value - before).tolist())) == 1, "both parts of the value have the same pushes"
            back = hvd.allreduce(np.array([float(mine and len(begun) > 1)]), "back", op=hvd.Max)[0]
            if back:
                grown.append(float(value[0] - before[0]))
            state.batch += 1
            state.commit()

    run_fn(steps, lambda: None)(HandledState(HandlerRegistry([]), batch=0))
    store.barrier()
    return begun, grown, value.tobytes()


def train_some(cut_rank: int) -> tuple[tuple[int, int, int], list[float], bytes] | None:
    """The same with a store of a process set, which elastic training registers with each attempt, while the store stays.

    Returns:
        This worker's numbers in the store in the end, the growths, and the value; ``None`` on a rank that is no worker.
    """
    rank = context.engine().rank
    mine, value = rank == cut_rank, np.empty(SIZE, np.float32)
    store: Any = None
    sets: list[ProcessSet] = []
    grown: list[float] = []
    attempts = 0

    def steps(state: Any) -> None:
        nonlocal attempts, store
        attempts += 1
        if mine and attempts > 1:
            lost_for_good(store, sets[0])
        if context.engine().size == 4:  # otherwise one of the ranks is not there
            sets.append(process_sets.add_process_set(SOME))
        if store is None and rank in SOME:
            store = kvstore.create("dist_async", process_set=sets[0])
            store.set_optimizer(kvstore.optimizer.SGD(learning_rate=-1.0))
            store.init("w", np.zeros(SIZE, np.float32))
        grown.clear()
        while len(grown) < MORE:
            if state.batch == 2 and attempts == 1 and mine:
                cut()
            grown_by = 0.0
            if store is not None:
                store.barrier()  # all have pulled
                store.pull("w", out=value)
                before = value.copy()
                store.barrier()
                store.push("w", np.ones(SIZE, np.float32))
                store.pull("w", out=value)
                store.barrier()  # all have pushed
                store.pull("w", out=value)
                grown_by = float((value - before)[0])
            if hvd.allreduce(np.array([float(mine and attempts > 1)]), "back", op=hvd.Max)[0]:
                grown.append(grown_by)
            state.batch += 1
            state.commit()

    run_fn(steps, lambda: None)(HandledState(HandlerRegistry([]), batch=0))
    if store is None:
        return None
    store.barrier()
    return (store.rank, store.local_rank, store.num_workers), grown, value.tobytes()


def lost_for_good(store: Any, made_of: ProcessSet) -> None:
    """Nothing waits for others that have gone on without this rank, although it is in the world again."""
    assert made_of.process_set_id is None
    with pytest.raises(InvalidRequestError, match="There is no process set"):
        store.barrier()
    with pytest.raises(kvstore.KVStoreError, match="register one of the same ranks anew"):
        store.rank  # noqa: B018  (a property)


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_rank", [0, 2])
def test_a_worker_that_was_cut_off_takes_part_again(cut_rank: int) -> None:
    with Ranks(3, env=SERVERS) as ranks:
        found = ranks.run(train, cut_rank, timeout=PATIENCE)
    for begun, grown, value in found:
        assert begun[-1] == 3
        assert grown == [3.0] * MORE
        assert value == found[0][2]
    assert len(found[cut_rank][0]) > 1


@pytest.mark.parametrize("cut_rank", [0, 2])
def test_in_a_process_set_that_is_registered_anew_it_does_as_well(cut_rank: int) -> None:
    with Ranks(4, env=SERVERS) as ranks:
        found = ranks.run(train_some, cut_rank, timeout=PATIENCE)
    assert found.pop(1) is None
    for number, (numbers, grown, value) in enumerate(found):
        assert numbers == (number, number, 3)
        assert grown == [3.0] * MORE
        assert value == found[0][2]

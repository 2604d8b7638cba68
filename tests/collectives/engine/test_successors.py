"""The coordinator dies, and a successor takes its place: ranks keep their memory and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import api, context
from hvdlab.collectives.process_sets import add_process_set
from ranks import Ranks


@pytest.fixture(params=["unix", "tls"])
def three(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(3, keep=True, tls=request.param == "tls") as ranks:
        yield ranks


def kill(ranks: Ranks) -> None:
    os.kill(ranks.coordinator.pid, signal.SIGKILL)


# -- on the ranks -------------------------------------------------------------------------------------------------

memory: dict[str, Any] = {}


def total(value: float = 1.0, name: str | None = "total") -> float:
    return float(api.allreduce(np.full(5000, value), name, op=api.Sum)[0])


def wait_for(name: str) -> None:
    operation = api.allreduce_async(np.ones(4, np.float32), name, op=api.Sum)
    context.engine().flush()
    context.engine().post("waiting", b"")
    api.synchronize(operation)


def reduce_large_ones_until_it_fails() -> None:
    x = np.ones(1 << 22, np.float32)
    context.engine().post("waiting", b"")
    while True:
        api.allreduce(x, "large", op=api.Sum)


def keep(name: str, value: object) -> None:
    memory[name] = value


def recall(name: str) -> object:
    return memory[name]


def epochs() -> dict[int, int]:
    return {id: group.epoch for id, group in context.engine()._guarded.state.sets.items()}


def add(ranks: list[int]) -> int | None:
    memory["set"] = add_process_set(ranks)
    return memory["set"].process_set_id


def total_in_set(value: float) -> float:
    return float(
        api.allreduce(np.full(300, value), "in", op=api.Sum, process_set=memory["set"].process_set_id)[0]
    )


# -- tests --------------------------------------------------------------------------------------------------------


def test_between_collectives(three: Ranks) -> None:
    three.run(keep, "model", [1, 2, 3])
    assert three.run(total) == [3.0] * 3
    before = three.run(epochs)
    kill(three)
    three.coordinator.respawn()
    assert three.run(total) == [3.0] * 3
    assert three.run(recall, "model") == [[1, 2, 3]] * 3
    after = three.run(epochs)
    assert all(new[0] > old[0] for new, old in zip(after, before, strict=True))

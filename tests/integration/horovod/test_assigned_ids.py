"""``process_set_id`` is set by users' code, as the plain attribute that it is in Horovod."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import hvdlab.numpy as hvd_numpy
import hvdlab.torch as hvd
from hvdlab.collectives.errors import InvalidRequestError, NotInitializedError
from support.ranks.resident import Ranks, resident_ranks

three = resident_ranks(3, imports=["hvdlab.torch"])


def _refusals(process_set: hvd.ProcessSet) -> list[str]:
    """Return the error of each use of a set, as text."""
    found = []
    for use in (
        process_set.rank,
        process_set.size,
        process_set.included,
        lambda: hvd.allreduce(torch.ones(1), process_set=process_set),
        lambda: hvd.grouped_allgather([torch.ones(1)], process_set=process_set),
        lambda: hvd.barrier(process_set=process_set),
        lambda: hvd.broadcast_object(1, process_set=process_set),
        lambda: hvd_numpy.allreduce(np.ones(1), process_set=process_set),
        lambda: hvd.remove_process_set(process_set),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # the caller compares the texts
            use()
        found.append(str(raised.value))
    return found


def _use_of_a_set_by_its_number() -> dict[str, Any]:
    pair = hvd.add_process_set([0, 2])
    mine = hvd.ProcessSet([1])
    mine.process_set_id = np.int64(pair.process_set_id or 0)
    place = mine.process_set_id == pair.process_set_id, mine.ranks, mine.size(), mine.rank(), mine.included()
    total = hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum, process_set=mine) if mine.included() else None
    # The number is that of a set which is registered: there is no second one.
    with pytest.raises(InvalidRequestError, match="registered already"):
        hvd.add_process_set(mine)
    sent = hvd.broadcast_object(mine if hvd.rank() == 0 else None, root_rank=0)
    assert sent.process_set_id == pair.process_set_id
    mine.process_set_id = 77
    unknown = set(_refusals(mine))
    ranks = mine.ranks
    mine.process_set_id = pair.process_set_id
    assert hvd.remove_process_set(mine)
    gone = pair.process_set_id, mine.process_set_id
    return {
        "place": place,
        "total": None if total is None else total.item(),
        "unknown": unknown,
        "ranks": ranks,
        "gone": gone,
    }


def test_a_set_is_used_by_the_number_that_it_was_given(three: Ranks) -> None:
    for rank, found in enumerate(three.run(_use_of_a_set_by_its_number)):
        members = [0, 2]
        position = members.index(rank) if rank in members else None
        assert found["place"] == (True, members, 2, position, rank in members)
        assert found["total"] == (2 if rank in members else None)
        (text,) = found["unknown"]
        assert text.startswith("There is no process set 77. Those that exist have process_set_id 0, 1:")
        assert found["ranks"] == [1]
        assert found["gone"] == (None, None)


def test_a_number_without_a_set_is_named_with_those_that_there_are(world_of_one: None) -> None:
    mine = hvd.ProcessSet([0])
    for number in (5, -1):
        mine.process_set_id = number
        assert mine.process_set_id == number
        assert repr(mine) == f"ProcessSet(process_set_id={number}, ranks=[0])"
        (text,) = set(_refusals(mine))
        assert text.startswith(f"There is no process set {number}. Those that exist have process_set_id 0:")
    for wrong in ("1", 0.5, [1]):
        with pytest.raises(InvalidRequestError, match="process_set_id"):
            mine.process_set_id = wrong  # type: ignore[assignment]  # on purpose
    assert mine.process_set_id == -1
    mine.process_set_id = None
    assert (mine.process_set_id, mine.size(), mine.rank(), mine.included()) == (None, None, None, None)


def test_number_0_stands_for_the_global_set(world_of_one: None) -> None:
    mine = hvd.ProcessSet([3])
    mine.process_set_id = 0
    assert (mine.ranks, mine.size(), mine.rank(), mine.included()) == ([0], 1, 0, True)
    assert hvd.allreduce(torch.ones(1), process_set=mine).item() == 1.0
    copied = copy.copy(mine)
    assert copied is not mine
    assert (copied.process_set_id, copied.ranks) == (0, [0])


def test_the_global_set_keeps_its_number(world_of_one: None) -> None:
    hvd.global_process_set.process_set_id = 0
    for wrong in (None, 1):
        with pytest.raises(InvalidRequestError, match="global_process_set"):
            hvd.global_process_set.process_set_id = wrong
    assert hvd.global_process_set.process_set_id == 0


def test_a_number_belongs_to_the_world_in_which_it_was_given(world_of_one: None) -> None:
    mine = hvd.ProcessSet([0])
    mine.process_set_id = 1
    hvd.shutdown()
    assert (mine.process_set_id, mine.size()) == (None, None)
    hvd.init()
    context_set = _second_set()
    assert context_set == 1  # the same number, another set
    assert (mine.process_set_id, mine.size()) == (None, None)
    with pytest.raises(InvalidRequestError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=mine)


def _second_set() -> int:
    """Register a set beside the global one in a world of one, which the binding refuses."""
    from hvdlab.collectives import context

    return context.engine().add_process_set([0])


def test_a_number_given_before_init_counts_in_the_first_world_alone(world_of_one: None) -> None:
    hvd.shutdown()
    mine = hvd.ProcessSet([0])
    mine.process_set_id = 1
    assert mine.process_set_id == 1
    with pytest.raises(NotInitializedError):
        mine.size()
    hvd.init()
    assert mine.process_set_id == 1
    with pytest.raises(ValueError, match="no process set 1"):
        mine.size()
    assert _second_set() == 1
    assert (mine.size(), mine.rank(), mine.included()) == (1, 0, True)
    hvd.shutdown()
    assert mine.process_set_id is None


def _registered_all_the_same() -> list[Any]:
    hvd.shutdown()
    first, second, third = hvd.ProcessSet([0]), hvd.ProcessSet([1]), hvd.ProcessSet([2])
    second.process_set_id = 1  # will be the first one's
    hvd.init(process_sets=[first, second])
    third.process_set_id = 9  # no set has it, so that the set can be registered
    hvd.add_process_set(third)
    found: list[object] = [(each.process_set_id, each.ranks) for each in (first, second, third)]
    second.process_set_id = second.process_set_id
    copied = copy.deepcopy(third)
    third.process_set_id = 40
    lost = copy.copy(third)
    found.append((copied.process_set_id, lost.process_set_id))
    for each in (copied, first, second):
        assert hvd.remove_process_set(each)
    return found


def test_a_set_with_a_number_of_no_set_is_registered(three: Ranks) -> None:
    assert three.run(_registered_all_the_same) == [[(1, [0]), (2, [1]), (3, [2]), (3, 40)]] * 3

"""States with handlers, for objects of no framework: their saving, restoring and synchronizing, and the ranks that do
it."""

from __future__ import annotations

import logging
import sys
from typing import Any
from unittest import mock

import pytest

import hvdlab.numpy as hvd
from hvdlab.bindings.elastic_sampler import ElasticSampler
from hvdlab.bindings.elastic_state import (
    HandledState,
    HandlerRegistry,
    LoadableStateHandler,
    SamplerStateHandler,
    StateHandler,
)
from hvdlab.collectives import context
from hvdlab.collectives.elastic import HostsUpdatedInterrupt
from hvdlab.collectives.elastic import state as elastic_state
from hvdlab.collectives.elastic.state import ATTEMPT, Lineage, next_attempt
from support.ranks.resident import Ranks, resident_ranks


class Schedule:
    """Something with a state of its own, as a framework's objects have."""

    def __init__(self, rate: float) -> None:
        self.rates = [rate]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}  # the very list: code that keeps it has to copy it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]


class Counting(StateHandler[Schedule]):
    """Handler that counts how it is used."""

    def __init__(self, value: Schedule) -> None:
        super().__init__(value)
        self.calls: list[tuple[str, int | None]] = []

    def save(self) -> None:
        self.calls.append(("save", self.root))

    def restore(self) -> None:
        self.calls.append(("restore", self.root))

    def sync(self) -> None:
        self.calls.append(("sync", self.root))

    def reset(self) -> None:
        self.calls.append(("reset", self.root))


REGISTRY = HandlerRegistry([(Schedule, LoadableStateHandler), (ElasticSampler, SamplerStateHandler)])


three = resident_ranks(3, imports=["hvdlab.numpy"])


# -- on the ranks -----------------------------------------------------------------------------------------------------


def saved_and_restored() -> list[Any]:
    schedule = Schedule(0.5)
    state: Any = HandledState(REGISTRY, schedule=schedule, epoch=1)
    schedule.rates.append(0.25)
    state.save()
    found: list[Any] = []
    for epoch in (2, 3):  # any number of times
        schedule.rates.append(0.0)
        state.epoch = epoch
        state.restore()
        found.append((list(schedule.rates), state.epoch, state.schedule is schedule))
    return [*found, "torch" in sys.modules]


def test_restore_goes_back_to_what_was_saved(three: Ranks) -> None:
    assert three.run(saved_and_restored) == [[([0.5, 0.25], 1, True)] * 2 + [False]] * 3


def assigned() -> list[Any]:
    state: Any = HandledState(REGISTRY, schedule=Schedule(0.5), later=None, epoch=0)
    kinds = {name: type(handler).__name__ for name, handler in state._handlers.items()}
    other, late = Schedule(1.0), Schedule(2.0)
    state.schedule, state.later, state.epoch = other, late, 5
    other.rates.append(9.0)
    late.rates.append(9.0)
    state.restore()
    same = state.schedule is other and state.later is late
    return [kinds, same, other.rates, late.rates, state.epoch]


def test_assigning_replaces_the_object_and_a_later_one_gets_a_handler(three: Ranks) -> None:
    expected = [{"schedule": "LoadableStateHandler"}, True, [1.0], [2.0], 0]
    assert three.run(assigned) == [expected] * 3


def synchronized(ahead: int | None) -> list[Any]:
    """Each rank has a state of its own; rank ``ahead`` has committed once more than the others."""
    rank = hvd.rank()
    sampler = ElasticSampler(range(6), shuffle=False)
    schedule = Schedule(float(rank))
    state: Any = HandledState(REGISTRY, schedule=schedule, sampler=sampler, rank=rank)
    sampler.record_indices([rank])
    if rank == ahead:
        state.save()
    state.sync()
    first = [list(schedule.rates), sorted(sampler.processed_indices), state.rank]
    schedule.rates.append(-1.0)
    state.rank = -1
    state.restore()
    again = [list(schedule.rates), sorted(sampler.processed_indices), state.rank]
    return [first, again, list(sampler)]


@pytest.mark.parametrize("ahead", [None, 2])
def test_the_state_of_the_rank_that_is_ahead_wins(three: Ranks, ahead: int | None) -> None:
    root = ahead or 0
    expected = [[float(root)], [0, 1, 2], root]
    assert three.run(synchronized, ahead) == [[expected, expected, [index]] for index in (3, 4, 5)]


def cut_off() -> list[Any]:
    """Rank 0 commits once more and is cut off; the others go back, and begin again without it before it is let in."""
    rank = hvd.rank()
    sampler = ElasticSampler(range(6), shuffle=False)
    state: Any = HandledState(REGISTRY, schedule=Schedule(0.0), sampler=sampler, rank=-1)
    state.sync()
    sampler.record_indices([rank])
    if rank:
        state.restore()
        state._saves = next_attempt(state._saves)
    else:
        state.save()
    state.rank = rank
    state.schedule.rates.append(float(rank))
    state.sync()
    return [state.rank, state.schedule.rates, sorted(sampler.processed_indices)]


def test_a_rank_that_was_cut_off_gets_the_state_of_those_that_have_begun_again(three: Ranks) -> None:
    assert three.run(cut_off) == [[1, [0.0, 1.0], []]] * 3


class Lines(logging.Handler):
    """Handler that keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def lost_each_other() -> list[Any]:
    """Rank 1 was cut off after a commit. Rank 0 has begun from nothing meanwhile, and committed more often; rank 2 is new."""
    rank = hvd.rank()
    lineage, lines = Lineage(), Lines()
    sampler = ElasticSampler(range(6), shuffle=False)
    state: Any = HandledState(REGISTRY, schedule=Schedule(float(rank)), sampler=sampler, rank=rank)
    if rank < 2:
        job = context.engine().settings.coordinator
        assert job is not None
        lineage.join(job, 2 - rank)
        state._saves = (2 - rank) * ATTEMPT
        sampler.record_indices([rank])
        for _ in range(3 - 2 * rank):
            state.save()
    logger = logging.getLogger("hvdlab.elastic")
    with (
        mock.patch.object(elastic_state, "process_lineage", lineage),
        mock.patch.object(logger, "handlers", [lines]),
        mock.patch.object(logger, "propagate", False),
    ):
        state.sync()
    found = [state.rank, state.schedule.rates, sorted(sampler.processed_indices), lineage.began]
    return [*found, state._saves, state._commits_before, lines.texts]


def test_all_go_on_from_the_first_training_and_none_from_samples_of_another(three: Ranks) -> None:
    """The model has not learnt from the samples that rank 0 has processed alone: they are processed again."""
    expected = [1, [1.0], [1], 1, 3 * ATTEMPT, 1]
    replaced = (
        "the state of this rank is replaced by that of rank 1, since each had begun to train while it could not reach the other: "
        "3 of its own commits are dropped, and training goes on after 1 of that rank"
    )
    assert three.run(lost_each_other) == [[*expected, [replaced]], [*expected, []], [*expected, []]]


def another_epoch() -> list[Any]:
    sampler = ElasticSampler(range(6), shuffle=False)
    state: Any = HandledState(REGISTRY, sampler=sampler)
    sampler.record_indices([hvd.rank()])
    if hvd.rank() == 1:
        sampler.set_epoch(1)
        sampler.record_indices([5])
        state.save()
    state.sync()
    return [sampler.epoch, sorted(sampler.processed_indices)]


def test_what_was_processed_in_another_epoch_does_not_count(three: Ranks) -> None:
    assert three.run(another_epoch) == [[1, [5]]] * 3


def handled() -> list[Any]:
    state: Any = HandledState(HandlerRegistry([(Schedule, Counting)]), schedule=Schedule(0.0))
    if hvd.rank() == 1:
        state.save()
    state.sync()
    state.on_reset()
    state.restore()
    return list(state._handlers["schedule"].calls)


def test_handlers_learn_the_root_and_forget_it_when_ranks_change(three: Ranks) -> None:
    common = [("sync", 1), ("reset", None), ("restore", None)]
    assert three.run(handled) == [common, [("save", None), *common], common]


def interrupted_by_one() -> list[Any]:
    """Only one rank has heard of the news, and it is the first in one round, another in the other."""
    raised = []
    state = HandledState(REGISTRY, epoch=0)
    state.sync()
    for teller in (0, 2):
        state.on_reset()
        if hvd.rank() == teller:
            state.on_hosts_updated(10.0 + teller, 2)
        try:
            state.commit()
        except HostsUpdatedInterrupt as interrupt:
            raised.append((teller, interrupt.skip_sync))
    return raised


def test_all_ranks_are_interrupted_or_none(three: Ranks) -> None:
    assert three.run(interrupted_by_one) == [[(0, False), (2, False)]] * 3


# -- here -------------------------------------------------------------------------------------------------------------


def test_the_first_kind_that_fits_is_taken() -> None:
    class Special(Schedule):
        pass

    registry = HandlerRegistry([(Special, Counting), ((Schedule, int), LoadableStateHandler)])
    assert type(registry.handler_for(Special(0.0))) is Counting
    assert type(registry.handler_for(Schedule(0.0))) is LoadableStateHandler
    assert registry.handler_for("text") is None


def test_the_base_handler_leaves_the_rest_to_subclasses() -> None:
    handler: StateHandler[int] = StateHandler(1)
    for method in (handler.save, handler.restore, handler.sync):
        with pytest.raises(NotImplementedError):
            method()
    assert handler.root_rank == 0

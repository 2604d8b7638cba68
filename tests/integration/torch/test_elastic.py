"""Elastic training with real processes: failures, lost ranks, ranks that come back."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.bindings.elastic_sampler import first_rank
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, CauseKind, CollectiveError, MismatchError
from hvdlab.torch import elastic
from support.patience import PATIENCE
from support.ranks.resident import RankGone, Ranks, resident_ranks

SAMPLES, BATCH, EPOCHS = 36, 2, 2


world = resident_ranks(
    3, imports=["hvdlab.torch.elastic"], env={"HOROVOD_ELASTIC_TIMEOUT": "20"}, scope="function"
)


# -- on the ranks ---------------------------------------------------------------------------------------------------------


class Training:
    """Small training with a log of a rank's events."""

    def __init__(self) -> None:
        hvd.init()
        torch.manual_seed(hvd.rank())  # the state's synchronization has to make the models alike
        model = torch.nn.Linear(3, 1)
        self.data = torch.arange(SAMPLES * 3, dtype=torch.float32).reshape(SAMPLES, 3) / (SAMPLES * 3)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        self.state = elastic.TorchState(
            model=model,
            optimizer=optimizer,
            sampler=elastic.ElasticSampler(range(SAMPLES)),
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            epoch=0,
            batch=0,
            log=[],
        )
        self.sizes: list[int] = []
        self.causes: list[str] = []
        self.commits = 0
        self.state.register_reset_callbacks([lambda: self.sizes.append(hvd.size())])

    def run(self, events: dict[int, str], epochs: int = EPOCHS) -> dict[str, Any]:
        """Train; ``events`` are the acts of this rank, by the number of its commits after which each is due."""

        @elastic.run
        def train(state: Any) -> str:
            while state.epoch < epochs:
                sampler = state.sampler
                iter(sampler)
                for number in range(len(sampler.indices[::BATCH])):
                    indices = sampler.get_indices(number, BATCH)
                    state.optimizer.zero_grad()
                    loss = state.model(self.data[indices]).square().mean()
                    loss.backward()
                    state.optimizer.step()
                    sampler.record_batch(number, BATCH)
                    state.batch += 1
                    everybody = hvd.allgather_object(indices, name="indices")
                    state.log.append((state.epoch, sorted(i for some in everybody for i in some)))
                    self.commits += 1
                    event = events.pop(self.commits, None)
                    if event is not None:
                        name, *more = event.split()
                        EVENTS[name](state, *more)
                    state.commit()
                state.epoch += 1
                state.scheduler.step()
                sampler.set_epoch(state.epoch)
                state.commit()
            return "done"

        returned = train(self.state)
        state: Any = self.state
        return {
            "returned": returned,
            "weights": [p.detach().clone() for p in state.model.parameters()],
            "momenta": [state.optimizer.state[p]["momentum_buffer"] for p in state.model.parameters()],
            "lr": state.optimizer.param_groups[0]["lr"],
            "log": state.log,
            "batch": state.batch,
            "sizes": self.sizes,
            "left": sorted(events),
        }


def fail_here(state: Any) -> None:
    raise hvd.HorovodInternalError("injected")


def withdraw(state: Any) -> None:
    context.engine().withdraw("injected")


def die(state: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide(state: Any) -> None:
    raise ZeroDivisionError("of the user")


def wait_for_newcomer(state: Any, door: str) -> None:
    """Write to ``door`` that a rank may come, and return once it waits to be let in: the next commit then lets it in."""
    if hvd.rank() == first_rank():
        Path(door).write_text("come")
        arrived = threading.Event()
        regrouping = context.engine().elastic
        stop = regrouping.watch(lambda waiting, leaving: arrived.set() if waiting else None)
        assert regrouping.waiting or arrived.wait(50)
        stop()
    hvd.barrier()


EVENTS: dict[str, Callable[..., None]] = {
    event.__name__: event for event in (fail_here, withdraw, die, divide, wait_for_newcomer)
}


def train(events: dict[int, str] | None = None) -> dict[str, Any]:
    return Training().run(dict(events or {}))


def seen(log: list[tuple[int, list[int]]], epoch: int) -> set[int]:
    return {index for when, indices in log if when == epoch for index in indices}


def check_alike(results: list[dict[str, Any]]) -> None:
    first = results[0]
    for result in results:
        assert result["returned"] == "done"
        for key in ("weights", "momenta"):
            torch.testing.assert_close(result[key], first[key], rtol=0, atol=0)
        assert result["log"] == first["log"]
        assert (result["lr"], result["batch"]) == (first["lr"], first["batch"])
        assert result["lr"] == 0.1 * 0.5**EPOCHS
    for epoch in range(EPOCHS):
        assert seen(first["log"], epoch) == set(range(SAMPLES))


# -- all ranks live -------------------------------------------------------------------------------------------------------


def test_training_without_a_failure_processes_each_sample_once_per_epoch(ranks: Ranks) -> None:
    results = ranks.run(train)
    check_alike(results)
    assert results[0]["sizes"] == []
    counts = [sum(len(indices) for when, indices in results[0]["log"] if when == e) for e in range(EPOCHS)]
    padding = -SAMPLES % ranks.size
    assert counts == [SAMPLES + padding] * EPOCHS


def test_a_failure_that_all_ranks_see_goes_back_to_the_last_commit(four_ranks: Ranks) -> None:
    undisturbed = four_ranks.run(train)
    disturbed = four_ranks.run(train, {3: "fail_here", 7: "fail_here"})
    check_alike(disturbed)
    assert disturbed[0]["sizes"] == [4, 4]
    assert disturbed[0]["left"] == []
    # Samples since the commit are processed again, perhaps by other ranks; no sample is lost or counted twice.
    counts = [sum(len(i) for when, i in disturbed[0]["log"] if when == e) for e in range(EPOCHS)]
    assert counts == [sum(len(i) for when, i in undisturbed[0]["log"] if when == e) for e in range(EPOCHS)]


@pytest.mark.parametrize("event", ["fail_here", "withdraw"])
def test_a_failure_on_one_rank_alone_takes_all_back(four_ranks: Ranks, event: str) -> None:
    results = four_ranks.run(train, per_rank=[({},), ({4: event},), ({},), ({},)])
    check_alike(results)
    assert [result["sizes"] for result in results] == [[4]] * 4


def failing_in_sync() -> Any:
    """The first of two synchronizations fails on one rank."""
    training = Training()
    attempts = []

    class State(elastic.TorchState):
        def sync(self) -> None:
            attempts.append(1)
            if len(attempts) == 1:
                hvd.barrier()
            if len(attempts) == 1 and hvd.rank() == 1:
                raise hvd.HorovodInternalError("in sync")
            super().sync()

    training.state.__class__ = State
    return training.run({}), len(attempts)


def test_a_failure_while_the_state_is_synchronized_is_one_like_others(four_ranks: Ranks) -> None:
    results = four_ranks.run(failing_in_sync)
    check_alike([result for result, _ in results])
    assert [attempts for _, attempts in results] == [2] * 4


def test_an_error_of_the_users_ends_the_training_and_the_ranks_can_go_on(four_ranks: Ranks) -> None:
    outcomes = four_ranks.outcomes(train, {3: "divide"})
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 4
    check_alike(four_ranks.run(train))


def disagree() -> Any:
    attempts = []

    @elastic.run
    def train(state: Any) -> None:
        attempts.append(1)
        hvd.allreduce(torch.zeros(2 + hvd.rank() % 2), name="x")

    hvd.init()
    with pytest.raises(MismatchError):
        train(elastic.TorchState(epoch=0))
    hvd.barrier()
    return len(attempts)


def test_a_disagreement_without_a_commit_in_between_is_tried_twice(four_ranks: Ranks) -> None:
    assert four_ranks.run(disagree) == [2] * 4


def limited() -> Any:
    hvd.init()
    attempts = []

    @elastic.run
    def train(state: Any) -> None:
        attempts.append(1)
        raise hvd.HorovodInternalError("again and again")

    with pytest.raises(CollectiveError, match="again and again") as caught:
        train(elastic.TorchState(epoch=0))
    return len(attempts), caught.value.__notes__


def test_the_reset_limit_ends_what_fails_again_and_again() -> None:
    with Ranks(2, imports=["hvdlab.torch.elastic"], env={"HVDLAB_RESET_LIMIT": "3"}) as ranks:
        assert (
            ranks.run(limited)
            == [(4, ["Training has begun again 3 times already (HVDLAB_RESET_LIMIT)."])] * 2
        )


def unnoticed() -> Any:
    """Ranks 2 and 3 use a process set of their own while rank 0 fails."""
    hvd.init()
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = pairs[hvd.rank() // 2]
    state = elastic.TorchState(step=0, fails=1)
    kinds = []

    @elastic.run
    def train(state: Any) -> int:
        while state.step < 50:
            state.step += 1
            if state.step == 20 and state.fails and hvd.rank() == 0:
                state.fails = 0
                state.save()
                raise hvd.HorovodInternalError("alone")
            try:
                hvd.allreduce(torch.ones(3), name="x", process_set=mine)
                if state.step % 10 == 0:
                    state.commit()
            except AbortedError as error:
                kinds.append(error.cause.kind)
                raise
        return int(state.step)

    steps = train(state)
    for pair in pairs:
        hvd.remove_process_set(pair)
    return steps, kinds


def test_ranks_outside_of_the_process_set_that_failed_come_back_too(four_ranks: Ranks) -> None:
    results = four_ranks.run(unnoticed)
    assert [steps for steps, _ in results] == [50] * 4
    assert results[0][1] == []
    assert all(kinds == [CauseKind.WITHDRAWN] for _, kinds in results[1:])


def registered_anew() -> Any:
    """Each beginning registers the same process set. Rank 1, which is not in it, fails in the first one; rank 2 is lost in the second."""
    hvd.init()
    state = elastic.TorchState(step=0)
    pairs: list[Any] = []
    refused = 0

    @elastic.run
    def train(state: Any) -> Any:
        nonlocal refused
        if hvd.size() == 2:
            return [(pair.ranks, pair.size(), pair.included(), repr(pair)) for pair in pairs]
        pairs.append(hvd.add_process_set([0, 2]))
        try:
            hvd.add_process_set([0, 2])
        except ValueError:
            refused += 1
        if len(pairs) == 1 and hvd.rank() == 1:
            raise hvd.HorovodInternalError("alone")
        if len(pairs) == 2 and hvd.rank() == 2:
            die(state)
        return hvd.allreduce(torch.ones(1), name="all")

    return train(state), refused


def test_a_process_set_is_registered_anew_where_training_begins_again(world: Ranks) -> None:
    outcomes = world.outcomes(registered_anew, timeout=60)
    assert isinstance(outcomes[2], RankGone)
    for rank in (0, 1):  # the rest of the sets, also as a rank outside them sees them
        left = [([0], 1, rank == 0, f"ProcessSet(process_set_id={id}, ranks=[0])") for id in (1, 2)]
        assert outcomes[rank] == (left, 2)


# -- lost ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_go_on_without_a_lost_rank(world: Ranks, lost: int) -> None:
    events = [({5: "die"},) if rank == lost else ({},) for rank in range(3)]
    outcomes = world.outcomes(train, per_rank=events)
    assert isinstance(outcomes[lost], RankGone)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
    check_alike(survivors)
    assert [result["sizes"] for result in survivors] == [[2]] * 2


def test_one_after_the_other_may_be_lost(world: Ranks) -> None:
    outcomes = world.outcomes(train, per_rank=[({9: "die"},), ({4: "die"},), ({},)])
    check_alike(outcomes[2:])
    assert outcomes[2]["sizes"] == [2, 1]


def lost_while_beginning_again(door: str) -> dict[str, Any]:
    """Rank 1 is lost in training, and rank 2 when it begins again without rank 1, once rank 0 has begun again with it."""
    training = Training()
    opened: list[bool] = []

    def pass_door() -> None:
        if hvd.rank() == 2:
            Path(door).read_bytes()
            die(training.state)
        elif not opened:
            opened.append(True)
            Path(door).write_bytes(b"")

    training.state.register_reset_callbacks([pass_door])
    return training.run({4: "die"} if hvd.rank() == 1 else {})


def test_a_rank_may_be_lost_while_the_others_begin_again(world: Ranks, tmp_path: Path) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    outcomes = world.outcomes(lost_while_beginning_again, str(door), timeout=60)
    check_alike(outcomes[:1])
    assert outcomes[0]["sizes"] == [2, 1]
    assert [type(outcome) for outcome in outcomes[1:]] == [RankGone] * 2


# -- ranks that come back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_comes_back_takes_part_again(world: Ranks, lost: int, tmp_path: Path) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    ready = os.open(door, os.O_RDONLY | os.O_NONBLOCK)
    survivors = [rank for rank in range(3) if rank != lost]
    running = {
        rank: world.start(
            train, {5: "die"} if rank == lost else {7: f"wait_for_newcomer {door}"}, ranks=[rank]
        )
        for rank in range(3)
    }
    assert isinstance(running[lost].outcomes()[0], RankGone)
    world.processes[lost].wait(PATIENCE)
    # Respawn it only when the others go on without it; otherwise they would begin again with it at once.
    assert select.select([ready], [], [], 60)[0]
    os.close(ready)
    world.respawn(lost)
    back = world.start(train, ranks=[lost])
    results = [running[rank].results(60)[0] for rank in survivors] + back.results(60)
    check_alike(results)
    assert [result["sizes"] for result in results[:2]] == [[2, 3]] * 2
    assert results[2]["sizes"] == []
    assert world.run(hvd_size) == [3] * 3


def hvd_size() -> int:
    return hvd.size()

"""The coordinator dies, and a successor takes its place: ranks keep their memory and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, CauseKind
from hvdlab.collectives.planes.gloo import GlooPlane
from hvdlab.collectives.planes.shm import ShmPlane
from hvdlab.collectives.process_sets import add_process_set
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import OpKind
from support.engine_probe import EngineProbe
from support.interrupting import press_ctrl_c, when_this_thread_waits
from support.patience import HOUR, PATIENCE
from support.ranks.resident import Ranks, Running, resident_ranks

three = resident_ranks(3, keep=True, scope="function")


@pytest.fixture(params=[pytest.param("unix", marks=pytest.mark.soak), "tls"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(
        2, keep=True, tls=request.param == "tls", env={"HVDLAB_PLANE": "gloo"}, imports=["torch"]
    ) as ranks:
        yield ranks


def kill(ranks: Ranks) -> None:
    os.kill(ranks.coordinator.pid, signal.SIGKILL)


def replace(ranks: Ranks, living: Sequence[int] | None = None) -> None:
    """Start a successor once all ranks, or those that live, know of the death.

    One that learns of it later loses what it submits until then, and the others wait for it in the successor's generation.
    """
    ranks.run(wait_until_lost, ranks=living, timeout=PATIENCE)
    ranks.coordinator.respawn(PATIENCE)


def start_and_kill(group: Ranks, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Running:
    """Kill the coordinator once the ranks that run ``function`` report that they wait."""
    with Client.connect(group.coordinator.address, group.coordinator.client_token) as client:
        told: SimpleQueue[int] = SimpleQueue()
        client.on_mail("waiting", lambda sender, body: told.put(sender))
        running = group.start(function, *args, **kwargs)
        for _ in running.numbers:
            told.get(timeout=PATIENCE)
        kill(group)
    return running


def assert_lost(error: Any) -> None:
    assert isinstance(error, AbortedError)
    assert error.cause.kind is CauseKind.COORDINATOR_LOST
    assert "the coordinator is gone" in str(error)


# -- on the ranks -------------------------------------------------------------------------------------------------

memory: dict[str, Any] = {}


def total(value: float = 1.0, name: str | None = "total") -> float:
    return float(hvd.allreduce(np.full(100_000, value), name, op=hvd.Sum)[0])


def wait_for(name: str) -> None:
    operation = hvd.allreduce_async(np.ones(4, np.float32), name, op=hvd.Sum)
    context.engine().flush()
    context.engine().post("waiting", b"")
    hvd.synchronize(operation)


def reduce_large_ones_until_it_fails() -> AbortedError | None:
    """Return the error by which one was lost, or nothing where the one lost for others had just been completed."""
    x = np.ones(1 << 22, np.float32)
    engine = context.engine()
    incarnation = engine.incarnation
    hvd.allreduce(x, "large", op=hvd.Sum)
    if engine.rank == 0:
        wait_within_the_next_one()
    else:
        engine.post("waiting", b"")
    while engine.incarnation == incarnation:
        try:
            hvd.allreduce(x, "large", op=hvd.Sum)
        except AbortedError as error:
            # A rank that was ahead has submitted another one, which is held until there is a successor.
            hvd.allreduce(x, "large", op=hvd.Sum)
            return error
    return None


def wait_within_the_next_one() -> None:
    """Report that this rank is in its next reduction, and stay in it until the coordinator is lost."""
    engine = context.engine()
    kind: Any = {"shm": ShmPlane, "gloo": GlooPlane}[engine.plane()]
    usual = kind.allreduce

    def reduce(plane: Any, *arguments: Any) -> None:
        kind.allreduce = usual
        engine.post("waiting", b"")
        wait_until_lost()
        usual(plane, *arguments)

    kind.allreduce = reduce


def keep(name: str, value: object) -> None:
    memory[name] = value


def recall(name: str) -> object:
    return memory[name]


def generations() -> dict[int, int]:
    return {id: group.generation for id, group in EngineProbe(context.engine()).locked.state.sets.items()}


def add(ranks: list[int]) -> int | None:
    added = memory["set"] = add_process_set(ranks)
    return added.process_set_id


def begin_to_add(ranks: tuple[int, ...]) -> None:
    engine = context.engine()
    name = f"process_set.add.{','.join(map(str, ranks))}"
    handle = engine.submit(Request(OpKind.ADD_PROCESS_SET, name, ranks=ranks))
    engine.flush()
    engine.post("waiting", b"")
    handle.wait()


def total_in_set(value: float) -> float:
    return float(
        hvd.allreduce(np.full(300, value), "in", op=hvd.Sum, process_set=memory["set"].process_set_id)[0]
    )


def plane() -> str:
    return context.engine().plane()


def wait_until_lost() -> None:
    guarded = EngineProbe(context.engine()).locked
    deadline = Deadline(PATIENCE)
    while not guarded._suspended and guarded.state.lost is None:
        deadline.check("the loss")


def begin(name: str) -> None:
    memory["operation"] = hvd.allreduce_async(np.ones(4), name, op=hvd.Sum)
    context.engine().flush()


def finish() -> None:
    hvd.synchronize(memory.pop("operation"))


def be_interrupted() -> str:
    operation = hvd.allreduce_async(np.ones(4), "held", op=hvd.Sum)
    ordinary = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressing = when_this_thread_waits(press_ctrl_c)
    try:
        hvd.synchronize(operation)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        pressing.join()
        signal.signal(signal.SIGINT, ordinary)
    return ""


def leave() -> None:
    """Leave without any hurry: the operation must end, not the time limit."""
    context.engine().close(HOUR)
    context.shutdown()


def init() -> None:
    context.init()


# -- tests --------------------------------------------------------------------------------------------------------


def test_between_collectives(three: Ranks) -> None:
    three.run(keep, "model", [1, 2, 3])
    assert three.run(total) == [3.0] * 3
    before = three.run(generations)
    kill(three)
    replace(three)
    assert three.run(total) == [3.0] * 3
    assert three.run(recall, "model") == [[1, 2, 3]] * 3
    after = three.run(generations)
    assert all(new[0] > old[0] for new, old in zip(after, before, strict=True))


def test_while_ranks_wait_for_another(three: Ranks) -> None:
    waiting = start_and_kill(three, wait_for, "loss", ranks=[0, 2])
    for error in waiting.outcomes():
        assert_lost(error)
        assert "allreduce `loss` (test_successors.py:" in str(error)
    replace(three)
    assert three.run(total) == [3.0] * 3


def lose_in_the_middle_of_a_transfer(ranks: Ranks) -> None:
    running = start_and_kill(ranks, reduce_large_ones_until_it_fails)
    ranks.coordinator.respawn(PATIENCE)
    errors = [error for error in running.outcomes() if error is not None]
    assert errors, "somebody was in the middle of one"
    for error in errors:
        assert_lost(error)
    assert ranks.run(total) == [float(ranks.size)] * ranks.size


def test_in_the_middle_of_a_transfer(three: Ranks) -> None:
    assert three.run(plane) == ["shm"] * 3
    lose_in_the_middle_of_a_transfer(three)


def test_in_the_middle_of_a_transfer_between_sockets(two: Ranks) -> None:
    assert two.run(plane) == ["gloo"] * 2
    lose_in_the_middle_of_a_transfer(two)
    kill(two)
    two.run(wait_until_lost)
    two.run(leave, timeout=PATIENCE)


def test_several_times_in_a_row(three: Ranks) -> None:
    three.run(keep, "x", 1)
    before = three.coordinator.incarnation
    for _ in range(2):
        kill(three)
        three.coordinator.respawn(PATIENCE)
    kill(three)
    replace(three)
    assert three.run(total) == [3.0] * 3
    assert three.coordinator.incarnation == before + 3
    kill(three)
    replace(three)
    assert three.run(total) == [3.0] * 3
    assert three.run(recall, "x") == [1] * 3


def test_what_is_submitted_meanwhile_is_held(three: Ranks) -> None:
    os.kill(three.coordinator.pid, signal.SIGKILL)
    three.run(wait_until_lost)
    running = three.start(total)
    three.coordinator.respawn(PATIENCE)
    assert running.results() == [3.0] * 3


def test_a_stopped_coordinator_is_replaced(three: Ranks) -> None:
    os.kill(three.coordinator.pid, signal.SIGSTOP)
    three.run(begin, "total")  # a rank that submits when others have lost theirs would wait for them
    running = three.start(finish)
    assert three.coordinator.running
    deadline = Deadline(PATIENCE)
    while not three.coordinator.stopped:
        deadline.check("its stop")
    three.coordinator.respawn(PATIENCE)
    assert not three.coordinator.stopped
    for error in running.outcomes():
        assert_lost(error)
    assert three.run(total) == [3.0] * 3


def test_process_sets_keep_their_numbers(three: Ranks) -> None:
    ids = three.run(add, [0, 2])
    kill(three)
    replace(three)
    assert three.run(total_in_set, 2.0, ranks=[0, 2]) == [4.0] * 2
    assert three.run(total) == [3.0] * 3
    later = three.run(add, [0, 1])
    assert len({*ids, *later}) == 2
    assert three.run(total_in_set, 1.0, ranks=[0, 1]) == [2.0] * 2


def test_adding_a_set_is_done_on_all_ranks_or_on_none(three: Ranks) -> None:
    adding = start_and_kill(three, begin_to_add, (0, 1), ranks=[0, 1])
    for error in adding.outcomes():
        assert_lost(error)
    replace(three)
    assert len(set(three.run(add, [0, 1]))) == 1
    assert three.run(total_in_set, 1.0, ranks=[0, 1]) == [2.0] * 2


def test_a_rank_that_dies_with_it(three: Ranks) -> None:
    kill(three)
    three.kill(1)
    replace(three, [0, 2])
    with Client.connect(three.coordinator.address, three.coordinator.client_token) as client:
        client.rank_lost(1, three.processes[1].pid, "killed by SIGKILL")
        for error in three.outcomes(total, ranks=[0, 2]):
            assert isinstance(error, AbortedError)
            assert error.cause.ranks == (1,)
            assert "rank 1 is gone" in str(error)
        assert three.run(total, ranks=[0, 2]) == [2.0] * 2
        three.respawn(1)
        three.run(init, ranks=[1])
        assert three.run(total) == [3.0] * 3


def test_an_interrupt_while_there_is_none(three: Ranks) -> None:
    kill(three)
    three.run(wait_until_lost)
    assert three.run(be_interrupted, ranks=[0]) == ["interrupted"]
    three.run(begin, "held", ranks=[1, 2])
    three.coordinator.respawn(PATIENCE)
    for error in three.outcomes(finish, ranks=[1, 2]):
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.INTERRUPTED
    assert three.run(total, 2.0) == [6.0] * 3


def test_without_a_successor_ranks_give_up() -> None:
    with Ranks(2, keep=True, env={"HVDLAB_REATTACH": "0.3"}) as ranks:
        kill(ranks)
        ranks.run(wait_until_lost)  # begun before, so lost for another reason
        for error in ranks.outcomes(total):
            assert isinstance(error, AbortedError)
            assert error.cause.kind is CauseKind.COORDINATOR_LOST
            assert "restart the group" in str(error)


def test_nobody_waits_when_its_starter_closes_it() -> None:
    with Ranks(2, keep=True, env={"HVDLAB_REATTACH": f"{HOUR:g}"}) as ranks:
        ranks.coordinator.close()
        ranks.run(wait_until_lost)
        for error in ranks.outcomes(total, timeout=PATIENCE):
            assert isinstance(error, AbortedError)
            assert "restart the group" in str(error)

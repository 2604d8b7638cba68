"""A parameter server without processes: messages are lost, repeated and delayed, and it ends at any step of a commit."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlab.collectives.errors import KVStoreError, ProtocolError
from hvdlab.collectives.kvstore import optimizers
from hvdlab.collectives.kvstore.lr_schedulers import FactorScheduler
from hvdlab.collectives.kvstore.optimizer_state import OptimizerSpec
from hvdlab.collectives.kvstore.optimizers import SGD, Updater, portable
from hvdlab.collectives.kvstore.servers import memory
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.memory import SharedFile, StoreMemory
from hvdlab.collectives.kvstore.servers.state import (
    AWAY_SECONDS,
    Disconnect,
    ParameterServerState,
    ServerReceived,
    ServerSend,
    ServerTick,
    WorkerArrived,
    WorkerDied,
    WorkerDisconnected,
)
from support.effort import examples

STORE = 7
KEY = "w"


class Killed(BaseException):
    """End of the server, as by SIGKILL: its writes to its memory stay, all other state is gone."""


class Steps:
    """Lets a server end at the n-th step that it makes in its memory."""

    NAMES = (
        (memory.ValueSlot, "copy_to"),
        (memory.Block, "commit"),
        (StoreMemory, "describe"),
        (StoreMemory, "add"),
        (StoreMemory, "keep"),
        (StoreMemory, "_write"),
        (StoreMemory, "_end_at"),
        (StoreMemory, "_release"),
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for owner, name in self.NAMES:
            patch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any) -> Any:
            self._step()
            result = function(*arguments)
            self._step()
            return result

        return stepped

    def _step(self) -> None:
        if self.left >= 0:
            self.left -= 1
            if self.left < 0:
                raise Killed


class Outbox:
    def __init__(self, file: SharedFile, *, remote: bool) -> None:
        self.array, self.remote = file.array, remote

    def write(self, offset: int, data: bytes) -> None:
        raise ProtocolError("shared")


class Worker:
    """Worker that acts as a link, without one: it keeps unanswered requests, and repeats them over each new
    connection."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.alive = world, rank, True
        self.remote = rank in world.remote
        self.outbox = SharedFile.create("test")
        self.outbox.grow(1 << 20)
        self.used = 0
        self.files: dict[int, SharedFile] = {}
        self.unanswered: dict[int, Any] = {}
        self.answers: dict[int, Any] = {}
        self.sequence = 0
        self.up: deque[tuple[Any, SharedFile | None]] = deque()
        self.down: deque[Any] = deque()
        self.peer = -1

    def request(self, make: Callable[[int], Any]) -> int:
        self.sequence += 1
        message = self.unanswered[self.sequence] = make(self.sequence)
        if self.peer >= 0:
            self.up.append((message, None))
        return self.sequence

    def place(self, array: Any) -> int:
        offset, self.used = self.used, self.used + memory.aligned(max(array.nbytes, 8))
        self.outbox.array(offset, array.dtype, array.shape)[...] = array
        return offset

    def connect(self) -> None:
        self.world.peers += 1
        self.peer = self.world.peers
        self.up.clear()
        self.down.clear()
        self.world.handle(
            WorkerArrived(self.peer, self.rank, 100 + self.rank, Outbox(self.outbox, remote=self.remote))
        )
        for store, file in self.files.items():
            self.up.append((m.Bring(store), SharedFile(os.dup(file.descriptor))))
        self.up.extend((message, None) for _, message in sorted(self.unanswered.items()))

    def cut(self) -> None:
        """End the connection with all messages in flight in both directions."""
        peer, self.peer = self.peer, -1
        self.up.clear()
        self.down.clear()
        if peer >= 0:
            self.world.handle(WorkerDisconnected(peer))

    def deliver_up(self) -> None:
        if self.up:
            message, file = self.up.popleft()
            self.world.handle(ServerReceived(self.peer, message, file))

    def deliver_down(self) -> None:
        if self.down:
            answer = self.down.popleft()
            if isinstance(answer, m.RequestDone | m.RequestFailed | m.Stock) and self.unanswered.pop(
                answer.sequence, None
            ):
                self.answers[answer.sequence] = answer


class World:
    """Server and its workers."""

    def __init__(self, size: int, steps: Steps, *, remote: tuple[int, ...] = ()) -> None:
        self.remote = remote
        self.steps, self.now, self.peers = steps, 0.0, 0
        self.kills = 0
        self.disconnected: list[str] = []
        self.server = ParameterServerState()
        self.workers = [Worker(self, rank) for rank in range(size)]
        ranks = tuple(range(size))
        for worker in self.workers:
            if worker.rank == 0:
                worker.files[STORE] = SharedFile.create("store")
            worker.connect()
            worker.request(lambda number: m.OpenStore(number, STORE, ranks))
        self.drain()

    def handle(self, event: Any) -> None:
        try:
            effects = self.server.handle(event, self.now)
        except Killed:
            self.restart()
            return
        for effect in effects:
            worker = next((w for w in self.workers if w.peer == effect.peer), None)
            if isinstance(effect, Disconnect):
                if effect.reason:
                    self.disconnected.append(effect.reason)
                if worker is not None:
                    worker.cut()
            elif isinstance(effect, ServerSend) and worker is not None:
                if isinstance(effect.message, m.SharedStoreMemory) and effect.file is not None:
                    worker.files.setdefault(STORE, SharedFile(os.dup(effect.file.descriptor)))
                worker.down.append(effect.message)

    def memory_used(self) -> int:
        """Return bytes of the store's memory that a server has written to."""
        return int(self.workers[0].files[STORE].array(8, np.dtype(np.uint64), (1,))[0])

    def tell(self, rank: int, message: Any) -> None:
        """Send a message that has no answer."""
        self.handle(ServerReceived(self.workers[rank].peer, message))

    def restart(self) -> None:
        """Replace the server by a successor; every connection is gone."""
        self.kills += 1
        self.steps.left = -1
        self.server = ParameterServerState()
        for worker in self.workers:
            worker.peer = -1
            worker.up.clear()
            worker.down.clear()
            if not worker.alive:
                self.handle(WorkerDied(worker.rank, 100 + worker.rank, "killed by SIGKILL"))

    def drain_up(self) -> None:
        """Deliver all messages that workers have sent."""
        for worker in self.workers:
            while worker.up:
                worker.deliver_up()

    def drain(self) -> None:
        """Deliver all messages."""
        while any(w.alive and (w.peer < 0 or w.up or w.down) for w in self.workers):
            for worker in self.workers:
                if worker.alive:
                    if worker.peer < 0:
                        worker.connect()
                    worker.deliver_up()
                    worker.deliver_down()

    def init(self, value: Any, key: str = KEY) -> int:
        first = self.workers[0]
        offset = first.place(value)
        number = first.request(lambda n: m.Init(n, STORE, key, value.shape, value.dtype.str[1:], offset))
        self.drain()
        return number

    def set_optimizer(self, optimizer: Any, *, keeps_states: bool = False) -> None:
        self.workers[0].request(lambda n: m.SetOptimizer(n, STORE, portable(optimizer), keeps_states))
        self.drain()

    def push(self, rank: int, array: Any, seen: int = 0) -> int:
        worker = self.workers[rank]
        offset = worker.place(array)
        return worker.request(lambda n: m.Push(n, STORE, KEY, array.dtype.str[1:], offset, seen))

    def pull(self, rank: int, like: Any) -> tuple[int, Any]:
        worker = self.workers[rank]
        offset = worker.place(np.full_like(like, -1))
        number = worker.request(lambda n: m.Pull(n, STORE, KEY, like.dtype.str[1:], offset))
        return number, worker.outbox.array(offset, like.dtype, like.shape)

    def value(self, rank: int, like: Any) -> Any:
        number, array = self.pull(rank, like)
        self.drain()
        assert isinstance(self.workers[rank].answers[number], m.RequestDone)
        return array.copy()


@pytest.fixture
def steps() -> Iterator[Steps]:
    with pytest.MonkeyPatch.context() as patch:
        yield Steps(patch)
    gc.collect()  # a world and its workers know each other, and have files


ACTIONS = ("push", "pull", "up", "up", "up", "down", "down", "cut", "connect", "kill")


def play(data: st.DataObject, world: World, each: int, make: Callable[[int, int], Any], like: Any) -> None:
    """Play random steps, faults among them; every worker makes ``each`` pushes in the end."""
    made = [0] * len(world.workers)
    pulls: list[tuple[int, int, int, Any]] = []
    for _ in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.integers(0, len(world.workers) - 1))
        worker, action = world.workers[rank], data.draw(st.sampled_from(ACTIONS))
        if action == "push" and made[rank] < each:
            world.push(rank, make(rank, made[rank]))
            made[rank] += 1
        elif action == "pull":
            pulls.append((rank, made[rank], *world.pull(rank, like)))
        elif action == "up":
            worker.deliver_up()
        elif action == "down":
            worker.deliver_down()
        elif action == "cut":
            worker.cut()
        elif action == "connect" and worker.peer < 0:
            worker.connect()
        elif action == "kill":
            world.steps.left = data.draw(st.integers(0, 12))
    for rank, count in enumerate(made):
        for number in range(count, each):
            world.push(rank, make(rank, number))
    world.drain()
    for rank, before, number, array in pulls:
        assert isinstance(world.workers[rank].answers[number], m.RequestDone)
        own = (
            array[rank * each : rank * each + each] if len(array) == len(world.workers) * each else array[:0]
        )
        assert (own[:before] == 1).all()  # a worker's pull includes all that it pushed before
    assert not any(worker.unanswered for worker in world.workers)
    assert world.disconnected == []


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), size=st.integers(1, 3))
def test_no_push_is_lost_or_applied_twice(steps: Steps, data: st.DataObject, size: int) -> None:
    each = 4
    remote = tuple(range(1, size)) if data.draw(st.booleans()) else ()
    world = World(size, steps, remote=remote)
    world.set_optimizer(create_test())
    zeros = np.zeros(size * each)
    world.init(zeros)

    def one_place(rank: int, number: int) -> Any:
        gradient = zeros.copy()
        gradient[rank * each + number] = 1
        return gradient

    play(data, world, each, one_place, zeros)
    assert world.value(0, zeros).tolist() == [1.0] * (size * each)


def create_test() -> Any:
    from hvdlab.collectives.kvstore.optimizers import create

    return create("test")


@settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_worker_alone_has_the_bits_of_one_process_whatever_happens(
    steps: Steps, data: st.DataObject
) -> None:
    each = 6
    optimizer = SGD(learning_rate=0.1, momentum=0.9, wd=0.01)
    world = World(1, steps)
    world.set_optimizer(optimizer)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(5).astype("f4")
    gradients = rng.standard_normal((each, 5)).astype("f4")
    world.init(weight)
    play(data, world, each, lambda rank, number: gradients[number], weight)
    updater = Updater(optimizer)
    for number in range(each):
        updater(KEY, gradients[number], weight)
    assert world.value(0, weight).tobytes() == weight.tobytes()


def test_a_server_may_end_at_every_step_of_a_training(steps: Steps) -> None:
    """Not at random: one run for each step there is."""
    step, ended = 0, True
    while ended:
        world = World(2, steps)
        world.init(np.ones(3, "f4"))
        expected = np.ones(3, "f4")
        for number, optimizer in enumerate((SGD(learning_rate=0.5), SGD(learning_rate=0.5, momentum=0.5))):
            steps.left = step if number else -1
            world.set_optimizer(optimizer)
            updater = Updater(optimizer)
            for _ in range(2):
                for rank in (0, 1):
                    world.push(rank, np.full(3, 1 + rank, "f4"))
                    world.drain()
                    updater(KEY, np.full(3, 1 + rank, "f4"), expected)
        ended, steps.left = world.kills > 0, -1
        assert world.value(0, expected).tobytes() == expected.tobytes(), f"killed at step {step}"
        step += 1
    assert step > 20


def test_a_server_may_end_at_every_step_of_writing_where_an_earlier_block_was(steps: Steps) -> None:
    step, ended = 0, True
    while ended:
        world = World(1, steps)
        expected = np.ones(3, "f4")
        world.init(expected)
        for number in range(5):
            optimizer = SGD(learning_rate=0.5 / (1 + number), momentum=0.5)
            steps.left = step if number == 3 else steps.left
            world.set_optimizer(optimizer)
            updater = Updater(optimizer)
            for _ in range(2):
                world.push(0, np.full(3, 1 + number, "f4"))
                world.drain()
                updater(KEY, np.full(3, 1 + number, "f4"), expected)
        ended, steps.left = world.kills > 0, -1
        world.restart()
        assert world.value(0, expected).tobytes() == expected.tobytes(), f"killed at step {step}"
        step += 1
    assert step > 20


def test_the_memory_of_a_store_does_not_grow_with_learning_rates(steps: Steps) -> None:
    world = World(2, steps)
    world.init(np.zeros(2, "f4"))
    sizes = []
    for number in range(3000):
        world.set_optimizer(SGD(learning_rate=1 / (1 + number), momentum=0.5), keeps_states=number > 0)
        if number in (10, 2999):
            sizes.append(world.memory_used())
    assert sizes[1] == sizes[0]
    world.restart()
    assert world.memory_used() == sizes[0]
    world.push(0, np.ones(2, "f4"))
    world.push(1, np.ones(2, "f4"))
    world.drain()
    assert world.value(0, np.zeros(2, "f4")) == pytest.approx(np.full(2, -2.5 / 3000))


def test_the_memory_of_a_store_does_not_grow_with_optimizers(steps: Steps) -> None:
    """As when the cell of a notebook that makes the optimizer is run repeatedly, also with servers that end meanwhile."""
    world = World(1, steps)
    world.init(np.zeros(1000, "f4"))
    sizes = []
    for number in range(20):
        world.set_optimizer(SGD(learning_rate=1.0, momentum=0.5))
        world.push(0, np.ones(1000, "f4"))
        world.drain()
        if number % 3 == 0:
            world.restart()
            world.drain()
        sizes.append(world.memory_used())
    assert sizes[-1] == sizes[3]
    assert world.value(0, np.zeros(1000, "f4")).tolist() == [-20.0] * 1000


def test_a_record_that_counts_already_is_not_written_again(steps: Steps) -> None:
    world = World(1, steps)
    world.init(np.zeros(2, "f4"))
    world.set_optimizer(SGD(learning_rate=1.0))
    store = StoreMemory(SharedFile(os.dup(world.workers[0].files[STORE].descriptor)))
    assert store.store is not None
    before = store._head().tolist()
    store.describe(store.store)
    assert store._head().tolist() == before
    store.close()


def test_the_learning_rate_goes_on_with_a_server_that_ends_at_any_step(steps: Steps) -> None:
    """That of a scheduler, which counts updates; then a new rate, with the states that there are."""
    step, ended = 0, True
    while ended:
        world = World(1, steps)
        expected = np.ones(3, "f4")
        world.init(expected)
        world.set_optimizer(SGD(momentum=0.5, lr_scheduler=FactorScheduler(1, 0.5, base_lr=0.25)))
        updater = Updater(SGD(momentum=0.5, lr_scheduler=FactorScheduler(1, 0.5, base_lr=0.25)))
        steps.left = step
        for number in range(4):
            if number == 2:
                later = SGD(learning_rate=2.0, momentum=0.5)
                world.set_optimizer(later, keeps_states=True)
                updater.optimizer = later
            world.push(0, np.full(3, 1 + number, "f4"))
            world.drain()
            updater(KEY, np.full(3, 1 + number, "f4"), expected)
        ended, steps.left = world.kills > 0, -1
        assert world.value(0, expected).tobytes() == expected.tobytes(), f"killed at step {step}"
        step += 1
    assert step > 20


def test_states_of_another_optimizer_are_not_kept(steps: Steps) -> None:
    world = World(1, steps)
    world.init(np.zeros(2, "f4"))
    world.set_optimizer(SGD(learning_rate=1.0, momentum=0.5))
    world.push(0, np.ones(2, "f4"))
    world.set_optimizer(create_test(), keeps_states=True)
    world.push(0, np.ones(2, "f4"))
    world.drain()
    assert world.value(0, np.zeros(2, "f4")).tolist() == [0.0] * 2


def test_staleness_counts_pushes_of_others_since_the_pull(steps: Steps) -> None:
    world = World(2, steps)
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    world.value(0, like)
    version = world.workers[0].answers[max(world.workers[0].answers)].version
    for _ in range(3):
        world.push(1, like + 1)
    world.drain()
    first = world.push(0, like + 1, seen=version)
    second = world.push(0, like + 1, seen=version + 1)  # one's own push is not counted
    world.drain()
    assert [world.workers[0].answers[number].staleness for number in (first, second)] == [3, 3]


def gone(world: World) -> tuple[int, ...]:
    """Return the workers that use the store no more, as a successor of the server would read it."""
    store = StoreMemory(SharedFile(os.dup(world.workers[0].files[STORE].descriptor)))
    assert store.store is not None
    found = store.store.gone
    store.close()
    return found


def test_others_go_on_without_a_dead_worker_and_the_last_one_takes_the_memory_with_it(steps: Steps) -> None:
    world = World(3, steps)
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    world.handle(WorkerDied(2, 99, "an older process of this rank"))
    assert gone(world) == ()
    world.workers[2].alive = False
    world.handle(WorkerDied(2, 102, "killed by SIGKILL"))
    assert gone(world) == (2,)
    world.push(0, like + 1)
    world.restart()
    world.drain()
    assert world.value(1, like).tolist() == [1, 1]
    for rank in (0, 1):
        world.workers[rank].up.append((m.CloseStore(STORE), None))
    world.drain()
    assert world.server.stock() == (0, 0)


def test_a_store_that_waits_for_its_memory_is_refused_once_a_worker_has_died(steps: Steps) -> None:
    world = World(2, steps)
    number = world.workers[1].request(lambda n: m.OpenStore(n, STORE + 1, (0, 1)))
    world.drain_up()
    world.workers[0].alive = False
    world.handle(WorkerDied(0, 100, "killed by SIGKILL"))
    world.drain()
    assert world.workers[1].answers[number] == m.RequestFailed(number, "rank 0 died: killed by SIGKILL", (0,))


def test_a_worker_without_a_connection_is_dead_after_a_while(steps: Steps) -> None:
    world = World(2, steps)
    world.init(np.zeros(2))
    world.workers[1].cut()
    assert world.server.next_tick() == AWAY_SECONDS
    world.handle(ServerTick())
    assert gone(world) == ()
    world.now = AWAY_SECONDS
    world.handle(ServerTick())
    assert gone(world) == (1,)


def test_a_worker_that_was_cut_off_takes_part_again_with_its_first_push(steps: Steps) -> None:
    world = World(2, steps)
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    world.handle(WorkerDied(1, 101, "no sign of life for 30 s"))  # the process lives, and connects again
    world.push(0, like + 1)
    world.drain()
    assert world.value(1, like).tolist() == [1, 1], "the others go on"
    assert gone(world) == (1,)
    world.push(1, like + 1)
    world.drain()
    assert gone(world) == ()
    assert world.value(0, like).tolist() == [2, 2]


def test_a_push_of_before_it_was_cut_off_is_not_applied_twice(steps: Steps) -> None:
    world = World(2, steps)
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    back = world.workers[1]
    push = world.push(1, like + 1)
    back.deliver_up()  # it is applied, and the answer is lost
    world.handle(WorkerDied(1, 101, "no sign of life for 30 s"))
    world.drain()
    assert isinstance(back.answers[push], m.RequestDone)
    later = world.push(1, like + 1)
    world.drain()
    assert isinstance(back.answers[later], m.RequestDone)
    assert world.value(0, like).tolist() == [2, 2]


def test_a_worker_of_another_host_waits_for_the_memory_to_be_brought(steps: Steps) -> None:
    world = World(2, steps, remote=(1,))
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    world.restart()
    far = world.workers[1]
    far.connect()
    first, second = world.push(1, like + 1), world.push(1, like + 1)
    for _ in range(5):
        far.deliver_up()
        far.deliver_down()
    assert far.unanswered
    world.drain()
    assert isinstance(far.answers[first], m.RequestDone)
    assert isinstance(far.answers[second], m.RequestDone)
    assert world.value(0, like).tolist() == [2, 2]
    world.restart()
    far.connect()
    lost = world.push(1, like + 1)
    for _ in range(5):
        far.deliver_up()
    world.now = world.server.next_tick()
    world.handle(ServerTick())
    far.deliver_down()
    assert "no worker of this server's host" in far.answers[lost].text


def test_memory_goes_with_the_last_worker(steps: Steps) -> None:
    world = World(2, steps)
    world.init(np.zeros(2))
    assert world.server.stock() == (1, 16)
    for worker in world.workers:
        assert world.server.stock()[0] == 1
        worker.up.append((m.CloseStore(STORE), None))
        world.drain()
    assert world.server.stock() == (0, 0)
    late = world.workers[0].request(lambda n: m.StockRequest(n, STORE))
    push = world.push(0, np.zeros(2))
    world.drain()
    for number in (late, push):
        assert "no such store" in world.workers[0].answers[number].text


WRONG_REQUESTS = [
    m.Push(99, STORE, KEY, "f8", 1 << 40),
    m.Push(99, STORE, KEY, "f8", -8),
    m.Push(99, STORE, KEY, "f8", 4),
    m.Push(99, STORE, KEY, "O8", 0),
    m.Push(99, STORE, KEY, "f8", 0, 0, 1 << 50),
    m.Push(99, STORE, "scalar", "f8", 0, 0, 1),
    m.Pull(99, STORE, KEY, "f8", 1 << 40),
    m.Pull(99, STORE, KEY, "V8", 0),
    m.Pull(99, STORE, "scalar", "f8", 0, 1),
    m.Init(99, STORE, "other", (1 << 40,), "f8", 0),
    m.Init(99, STORE, "other", (-1,), "f8", 0),
    m.Init(99, STORE, "other", (1,) * 80, "f8", 0),
    m.OpenStore(99, STORE + 1, (0,)),
    m.SetOptimizer(99, STORE, OptimizerSpec("nosuch", {})),
    m.SetOptimizer(99, STORE, OptimizerSpec("sgd", {})),
    m.SetOptimizer(99, STORE, OptimizerSpec("sgd", {**portable(SGD()).settings, "begin_num_update": -1})),
    m.SetOptimizer(99, STORE, OptimizerSpec("sgd", {**portable(SGD()).settings, "begin_num_update": None})),
]


@pytest.mark.parametrize("wrong", WRONG_REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_that_raises_is_answered_to_its_sender(steps: Steps, wrong: Any) -> None:
    world = World(2, steps)
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    world.init(np.zeros(()), key="scalar")
    world.workers[1].files[STORE + 1] = SharedFile.create("store")
    world.handle(ServerReceived(world.workers[1].peer, m.Bring(STORE + 1), SharedFile.create("store")))
    world.workers[1].unanswered[wrong.sequence] = wrong
    world.handle(ServerReceived(world.workers[1].peer, wrong))
    world.drain()
    assert isinstance(world.workers[1].answers[wrong.sequence], m.RequestFailed)
    assert world.disconnected == []
    world.push(0, like + 1)
    world.drain()
    assert world.value(0, like).tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        m.Bring(99),
        m.Data(0, b"x"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_without_an_answer_that_raises_ends_its_connection_alone(steps: Steps, wrong: Any) -> None:
    world = World(2, steps)
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    world.handle(ServerReceived(world.workers[1].peer, wrong))
    assert len(world.disconnected) == 1
    world.push(0, like + 1)
    world.drain()
    assert world.value(0, like).tolist() == [1, 1]
    world.handle(ServerReceived(12345, m.StockRequest(1, STORE)))  # a connection that has gone already
    assert world.value(1, like).tolist() == [1, 1]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture
def picky() -> Iterator[dict[str, BaseException | None]]:
    """Register an optimizer ``picky``, whose methods raise the exceptions put here under their names."""
    raised: dict[str, BaseException | None] = {"create_state": None, "update": None}

    class Picky(SGD):
        def create_state(self, index: Any, weight: Any) -> Any:
            if (error := raised["create_state"]) is not None:
                raise error
            return super().create_state(index, weight)

        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            if (error := raised["update"]) is not None:
                raise error
            super().update(index, weight, grad, state)

    optimizers._registered["picky"] = Picky
    yield raised
    del optimizers._registered["picky"]


ERRORS = [
    (ValueError, "Picky wants matrices", "the optimizer raised ValueError: Picky wants matrices"),
    (MemoryError, "", "the optimizer raised MemoryError"),
    (SystemExit, "3", "the optimizer raised SystemExit: 3"),
    (Unprintable, "", "the optimizer raised Unprintable"),
    (ValueError, "\udc80" * 9, "the optimizer raised ValueError: ?????????"),
    (KVStoreError, "x" * 100_000, "xxx"),
]


@pytest.mark.parametrize(
    ("kind", "argument", "text"), ERRORS, ids=["value", "memory", "exit", "str", "utf", "long"]
)
@pytest.mark.parametrize("method", ["create_state", "update"])
def test_what_an_optimizer_raises_is_answered(
    steps: Steps,
    picky: dict[str, BaseException | None],
    method: str,
    kind: type[BaseException],
    argument: str,
    text: str,
) -> None:
    world = World(2, steps)
    like = np.zeros(2)
    world.init(like)
    spec = OptimizerSpec("picky", portable(SGD(learning_rate=1.0)).settings)
    world.workers[0].request(lambda n: m.SetOptimizer(n, STORE, spec))
    world.drain()
    picky[method] = kind(argument)
    numbers = [world.push(0, like + 1)]
    if method == "create_state":
        numbers.append(world.init(like, key="second"))
    world.drain()
    for number in numbers:
        answer = world.workers[0].answers[number]
        assert answer.text.startswith(text)
        m.encode(answer)
    assert world.kills == 0
    picky[method] = None
    world.push(1, like + 1)
    world.drain()
    assert world.value(0, like).tolist() == [-1, -1]


def test_an_optimizer_that_a_successor_cannot_make_refuses_pushes_alone(
    steps: Steps, picky: dict[str, BaseException | None]
) -> None:
    world = World(1, steps)
    spec = OptimizerSpec("picky", portable(SGD()).settings)
    world.workers[0].request(lambda n: m.SetOptimizer(n, STORE, spec))
    world.init(np.ones(2))
    del optimizers._registered["picky"]
    world.restart()
    number = world.push(0, np.ones(2))
    world.drain()
    optimizers._registered["picky"] = SGD
    assert "'picky'" in world.workers[0].answers[number].text
    assert world.value(0, np.ones(2)).tolist() == [1, 1]


class Full(Outbox):
    """Outbox on a server that has no memory left for it."""

    def write(self, offset: int, data: bytes) -> None:
        raise MemoryError


def test_the_request_behind_data_without_room_is_answered(steps: Steps) -> None:
    world = World(2, steps, remote=(1,))
    world.set_optimizer(create_test())
    like = np.zeros(2)
    world.init(like)
    far = world.workers[1]
    world.server._workers[1].arena = Full(far.outbox, remote=True)
    world.tell(1, m.Data(32 << 30, b"x"))
    lost = world.push(1, like + 1)
    kept = world.push(1, like + 1)
    world.drain()
    assert "MemoryError" in far.answers[lost].text
    assert isinstance(far.answers[kept], m.RequestDone)
    assert world.disconnected == []


@pytest.mark.parametrize("end", [4096, 1 << 51])
def test_a_record_that_claims_more_than_there_is_is_refused(end: int) -> None:
    file = SharedFile.create("test")
    file.grow(4096)
    file.array(0, np.dtype(np.uint64), (10,))[:] = (memory._MAGIC, end, 0, 0, 0, 0, 0, 0, 8, (1 << 50) + 1)
    with pytest.raises(ProtocolError, match="damaged"):
        StoreMemory(file)


def test_memory_that_may_shrink_or_is_no_stores_is_refused() -> None:
    shrinking = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with pytest.raises(ProtocolError, match="may shrink"):
        SharedFile(shrinking)
    with open("/dev/null", "rb") as null, pytest.raises(ProtocolError, match="something else"):
        SharedFile(os.dup(null.fileno()))
    other = SharedFile.create("test")
    other.grow(4096)
    other.array(0, np.dtype(np.uint64), (1,))[0] = 5
    with pytest.raises(ProtocolError, match="not that of a store"):
        StoreMemory(other)

"""Tensors of two device classes in one process set, where operations of one of them end later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.errors import AbortedError, CauseKind, InvalidRequestError, MismatchError
from hvdlab.collectives.types import PLAIN, SUM, DType, OpKind, ReduceOp
from support.engine_probe import EngineProbe
from support.fakes import device as fake_device
from support.patience import PATIENCE
from support.ranks.resident import Ranks

COUNT = 5000


@pytest.fixture
def two() -> Iterator[Ranks]:
    with Ranks(2, init=False) as ranks:
        ranks.run(begin)
        yield ranks


# -- on the ranks -------------------------------------------------------------------------------------------------


def begin(has_device: bool = True) -> None:
    if has_device:
        fake_device.register()
    context.init()


def request(name: str, value: float, device: str, count: int = COUNT) -> Request:
    array = np.full(count, value, np.float32)
    tensor = fake_device.on_device(array, DType.F32) if device == fake_device.DEVICE else array
    return Request(OpKind.ALLREDUCE, name, tensor, None, DType.F32, SUM, device=device)


def value_of(result: Result) -> float:
    output = result.output
    return float((output if isinstance(output, np.ndarray) else fake_device.memory_of(output))[-1])


def submitted(name: str, value: float, device: str) -> Handle:
    engine = context.engine()
    handle = engine.submit(request(name, value, device))
    engine.flush()
    return handle


def total(device: str, value: float = 1.0) -> float:
    return value_of(context.engine().run(request(f"total on {device}", value, device)))


def planes() -> tuple[str, str]:
    engine = context.engine()
    found = engine.device_plane(0, fake_device.DEVICE)
    assert engine.device_planes() == ((found,) if found else ())
    return engine.plane(), found


def mixed(seed: int, count: int) -> list[float]:
    """Submit small and large tensors of both classes, on each rank in an order of its own."""
    engine = context.engine()
    handles: dict[int, Handle] = {}
    for i in np.random.default_rng(seed + engine.rank).permutation(count):
        device = fake_device.DEVICE if i % 2 else "cpu"
        handles[int(i)] = engine.submit(request(f"t{i}", float(i), device, 10 + 1000 * (int(i) % 3)))
    return [value_of(handles[i].wait()) for i in range(count)]


def host_meanwhile() -> tuple[list[float], bool, float]:
    """While the device works on something, tensors of the host go on."""
    fake_device.GO_ON.clear()
    try:
        handle = submitted("slow", 3.0, fake_device.DEVICE)
        sums = [total("cpu") for _ in range(3)]
        done = handle.done()
    finally:
        fake_device.GO_ON.set()
    return sums, done, value_of(handle.wait())


def hooked(count: int) -> tuple[list[str], bool]:
    """Whose hooks were called, and whether as many as there are were."""
    ended: list[str] = []
    all_ended = threading.Semaphore(0)
    engine = context.engine()
    asked = [request(f"d{i}", 1.0, fake_device.DEVICE, COUNT + i) for i in range(count)]
    for each in asked:

        def hook(result: Result | None, error: Exception | None, /, name: str | None = each.name) -> None:
            ended.append(str(name))
            all_ended.release()

        each.on_done = hook
        engine.submit(each)
    came = all(all_ended.acquire(timeout=PATIENCE) for _ in range(count))
    return ended, came


def given_up() -> str:
    """Check that operations in flight on the device end with their generation, although the device does not go on."""
    engine = context.engine()
    fake_device.GO_ON.clear()
    try:
        handle = submitted("stuck", 1.0, fake_device.DEVICE)
        # All have begun it by then. Rank 0 may be through with this, and give up, before rank 1 is.
        with contextlib.suppress(AbortedError):
            total("cpu")
        if engine.rank == 0:
            engine.withdraw("rank 0 gave up")
        with pytest.raises(AbortedError) as told:
            handle.wait(PATIENCE)
    finally:
        fake_device.GO_ON.set()
    return told.value.cause.kind.value


def begin_and_wait() -> str:
    handle = submitted("of the dead", 1.0, fake_device.DEVICE)
    context.engine().post("begun", b"")  # travels behind the announcement
    with pytest.raises(AbortedError) as told:
        handle.wait(PATIENCE)
    return told.value.cause.kind.value


def hold() -> None:
    fake_device.GO_ON.clear()


def disagree() -> str:
    device = fake_device.DEVICE if context.engine().rank else "cpu"
    with pytest.raises(MismatchError) as told:
        context.engine().run(request("bad", 1.0, device))
    return str(told.value)


def refused() -> str:
    with pytest.raises(InvalidRequestError) as told:
        context.engine().submit(request("nowhere", 1.0, fake_device.DEVICE))
    return str(told.value)


def adasum() -> str:
    asked = request("adasum", 1.0, fake_device.DEVICE)
    asked.reduction = PLAIN[ReduceOp.ADASUM]
    with pytest.raises(InvalidRequestError) as told:
        context.engine().submit(asked)
    return str(told.value)


def uneven() -> list[float]:
    """Rank 1 has joined: it takes part with zeros on the device."""
    engine = context.engine()
    sums = [total(fake_device.DEVICE, 7.0), total("cpu", 5.0)] if engine.rank == 0 else []
    engine.join()
    return sums


def leave_at_once() -> float:
    """Check that running operations finish before a rank leaves."""
    handle = submitted("last", 2.0, fake_device.DEVICE)
    total("cpu")
    context.shutdown()
    return value_of(handle.wait())


def of_a_set(remove: bool) -> float:
    engine = context.engine()
    chosen = engine.add_process_set([0, 1])
    asked = request("of the set", 2.0, fake_device.DEVICE)
    asked.process_set = chosen
    value = value_of(engine.run(asked))
    if remove:
        engine.remove_process_set(chosen)
    return value


def agreed() -> int:
    """Return how many requests this rank has had on the world's board."""
    member = EngineProbe(context.engine()).locked.state.sets[0].board_member
    assert member is not None
    number: int = member.board.number
    return number


def agreed_by_turns(count: int) -> tuple[list[float], int]:
    """Run blocking collectives of both classes; return how many of them the members agreed on in memory."""
    before = agreed()
    sums = [total(device, float(i)) for i in range(count) for device in (fake_device.DEVICE, "cpu")]
    return sums, agreed() - before


def in_another_order() -> float:
    """Rank 0 has a tensor of the device on its way, so that only the coordinator can have its next one executed."""
    pending = submitted("first", 3.0, fake_device.DEVICE) if context.engine().rank == 0 else None
    found = total(fake_device.DEVICE, 2.0)
    pending = pending or submitted("first", 3.0, fake_device.DEVICE)
    return found + value_of(pending.wait())


def threads() -> int:
    hvd.barrier()
    return sum(thread.name == "fake-device" for thread in threading.enumerate())


# -- tests ----------------------------------------------------------------------------------------------------------


def test_there_is_a_plane_for_each_class(two: Ranks) -> None:
    assert two.run(planes) == [("shm", fake_device.PLANE)] * 2
    assert two.run(total, "cpu") == two.run(total, fake_device.DEVICE) == [2.0] * 2


def test_members_agree_in_memory_on_what_they_wait_for(two: Ranks) -> None:
    two.run(total, fake_device.DEVICE)  # the plane is built
    sums = [2.0 * (i // 2) for i in range(40)]
    assert two.run(agreed_by_turns, 20) == [(sums, 40)] * 2


def test_what_members_do_not_agree_on_is_ordered_by_the_coordinator(two: Ranks) -> None:
    two.run(total, fake_device.DEVICE)
    for _ in range(5):
        assert two.run(in_another_order) == [10.0] * 2
    assert two.run(total, fake_device.DEVICE) == [2.0] * 2


@pytest.mark.parametrize("seed", range(3))
def test_both_classes_at_once_in_any_order(two: Ranks, seed: int) -> None:
    assert two.run(mixed, seed, 40) == [[2.0 * i for i in range(40)]] * 2


def test_the_host_goes_on_while_the_device_works(two: Ranks) -> None:
    two.run(total, fake_device.DEVICE)  # the plane is built
    assert two.run(host_meanwhile) == [([2.0] * 3, False, 6.0)] * 2


def test_the_hooks_of_what_ends_later_are_called_once_each(two: Ranks) -> None:
    first, second = two.run(hooked, 12)
    assert first[1]
    assert second[1]
    assert sorted(first[0]) == sorted(second[0]) == sorted(f"d{i}" for i in range(12))


def test_an_abort_ends_what_is_on_its_way(two: Ranks) -> None:
    two.run(total, fake_device.DEVICE)
    assert two.run(given_up) == ["withdrawn"] * 2
    assert two.run(total, fake_device.DEVICE) == two.run(total, "cpu") == [2.0] * 2
    assert two.run(threads) == [1] * 2


def test_a_death_ends_what_is_on_its_way(two: Ranks) -> None:
    two.run(total, fake_device.DEVICE)
    two.run(hold, ranks=[1])
    begun: SimpleQueue[int] = SimpleQueue()
    with Client.connect(two.coordinator.address, two.coordinator.client_token) as client:
        client.on_mail("begun", lambda sender, body: begun.put(sender))
        waiting = two.start(begin_and_wait)
        # A rank that begins after the death is alone, and needs no other one.
        assert {begun.get(timeout=PATIENCE), begun.get(timeout=PATIENCE)} == {0, 1}
    two.kill(1)
    assert waiting.outcomes()[0] == CauseKind.RANK_DIED.value


def test_a_tensor_that_is_elsewhere_on_another_rank_is_a_mismatch(two: Ranks) -> None:
    for text in two.run(disagree):
        assert "on cpu" in text
        assert "on fake" in text
    assert two.run(total, fake_device.DEVICE) == [2.0] * 2


def test_what_one_rank_does_not_offer_is_refused_on_all() -> None:
    with Ranks(2, init=False) as ranks:
        ranks.run(begin, per_rank=[(True,), (False,)])
        assert ranks.run(planes) == [("shm", "")] * 2
        for text in ranks.run(refused):
            assert "no data plane for tensors on fake" in text
        assert ranks.run(total, "cpu") == [2.0] * 2


def test_adasum_is_for_the_host(two: Ranks) -> None:
    assert all("copy them to the CPU" in text for text in two.run(adasum))


def test_who_has_joined_takes_part_with_zeros_there(two: Ranks) -> None:
    assert two.run(uneven) == [[7.0, 5.0], []]


def test_what_is_on_its_way_is_finished_before_a_rank_leaves(two: Ranks) -> None:
    assert two.run(leave_at_once) == [4.0] * 2


def test_a_process_set_has_planes_of_its_own(two: Ranks) -> None:
    assert two.run(of_a_set, False) == [4.0] * 2
    assert two.run(threads) == [1] * 2
    assert two.run(of_a_set, True) == [4.0] * 2

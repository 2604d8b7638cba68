"""Watched groups whose ranks go different ways: late launches, mismatches, timeouts, and the same group and model afterwards."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import select
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, CauseKind, InvalidRequestError, MismatchError
from hvdlab.torch.c10d import WatchOptions, watch_options, watched
from support.patience import GONE, PATIENCE, eventually
from support.ranks.resident import Ranks

LATE = 0.3  # seconds after which a rank counts as late in a watched group
KEPT: dict[str, Any] = {}
WATCHED: Any = watched
"""The module: tests replace functions and classes that it imports from others."""


def _begin() -> None:
    dist.init_process_group("hvdlab", pg_options=WatchOptions("watched", "gloo", LATE))
    KEPT["gloo"] = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    KEPT["model"] = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, init=False, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def _good() -> float:
    """One step of the model, and a sum."""
    model, rank = KEPT["model"], dist.get_rank()
    model.zero_grad()
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3
    return float(model.module.weight.grad.sum())


def good(world: Ranks) -> None:
    world.catch_up()
    assert len(set(world.run(_good, timeout=60))) == 1


def _disagrees() -> None:
    rank = dist.get_rank()
    tensor = torch.ones(2)
    with pytest.raises(MismatchError) as caught:
        dist.broadcast(tensor, 0) if rank == 1 else dist.all_reduce(tensor)
    assert caught.value.decision, "the error names no decision of the coordinator, whose story could be shown"
    text = str(caught.value)
    assert re.match(r"`(all_reduce|broadcast) #\d+ of group default_pg`: the ranks disagree\. ", text), text
    assert re.search(r"rank 1 \(test_c10d_watched\.py:\d+\): broadcast float32\[2\] from rank 0", text), text
    assert re.search(r"ranks? [0-9,-]+ \(test_c10d_watched\.py:\d+\): allreduce float32\[2\] sum", text), text


def test_another_operation_is_a_mismatch_on_all_ranks(world: Ranks) -> None:
    world.run(_disagrees, timeout=60)
    good(world)


def _disagrees_in_backward() -> str:
    model, rank = KEPT["model"], dist.get_rank()
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(MismatchError) as caught:
        dist.broadcast(torch.ones(2), 1) if rank == 1 else loss.backward()
    return str(caught.value)


def _import_compiler() -> None:
    importlib.import_module("torch._dynamo")


@pytest.mark.parametrize("compiler", [False, True], ids=["", "compiler"])
def test_a_mismatch_names_the_bucket_of_a_wrapped_model(world: Ranks, compiler: bool) -> None:
    good(world)
    if compiler:
        world.run(_import_compiler, timeout=60)
    for text in world.run(_disagrees_in_backward, timeout=60):
        assert "DDP bucket 0: bias, weight): allreduce float32[20] sum" in text, text
    good(world)


def _late_rank() -> float:
    """Rank 1 comes long after the others have been late."""
    tensor = torch.ones(2)
    if dist.get_rank() == 1:
        while not _stands_in():  # the others' stand-ins wait for this rank
            pass
    dist.all_reduce(tensor)
    return float(tensor[0])


def _stands_in() -> bool:
    group: Any = dist.group.WORLD
    return bool(group._generation.wanted)


def test_a_rank_that_comes_late_completes_the_operation(world: Ranks) -> None:
    assert world.run(_late_rank, timeout=60) == [float(world.size)] * world.size
    good(world)


def _pid() -> int:
    return os.getpid()


def _beside_a_stopped_comparer(pid: int) -> str:
    """Rank 0, which compares first, is stopped until the last rank has seen that the others' stand-ins wait for it."""
    rank, tensor = dist.get_rank(), torch.ones(2)
    engine = context.engine()
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    work = None if rank == 0 else dist.all_reduce(tensor, async_op=True)
    seen = ""
    if rank == dist.get_world_size() - 1:
        while not seen:
            seen = next((each.site for each in engine.pending() if each.kind == "barrier"), "")
        os.kill(pid, signal.SIGCONT)
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()
    assert tensor.tolist() == [dist.get_world_size()] * 2
    return seen


def test_ranks_wait_in_the_core_for_a_rank_that_is_stopped_and_compares_first(world: Ranks) -> None:
    seen = world.run(_beside_a_stopped_comparer, world.run(_pid)[0], timeout=60)
    assert re.match(r"test_c10d_watched\.py:\d+, all_reduce #\d+", seen[-1]), seen
    good(world)


def _too_long() -> str:
    if dist.get_rank() == 1:
        dist.monitored_barrier(KEPT["gloo"])
        return ""
    with pytest.raises(AbortedError, match="the timeout of the process group") as caught:
        dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=1))
    dist.monitored_barrier(KEPT["gloo"])
    return str(caught.value)


def test_a_wait_that_exceeds_its_limit_names_the_rank_that_is_missing(world: Ranks) -> None:
    for text in world.run(_too_long, timeout=60)[:1]:
        assert re.match(
            r"all_reduce #\d+ of group default_pg \(test_c10d_watched\.py:\d+\): ranks? [0-9,-]+ waited; ",
            text,
        ), text
    good(world)


def _skips() -> str:
    """Rank 1 skips a call that is like the one after it."""
    rank, works = dist.get_rank(), []
    for step in range(4):
        works.append(dist.all_reduce(torch.ones(2), async_op=True))
        if rank != 1 or step != 1:
            works.append(dist.all_reduce(torch.ones(2), async_op=True))
    for work in works[:-1]:
        work.wait()
    if rank == 1:
        works[-1].wait()
        dist.monitored_barrier(KEPT["gloo"])
        return ""
    with pytest.raises(AbortedError) as caught:
        works[-1].wait(timedelta(seconds=1))
    dist.monitored_barrier(KEPT["gloo"])
    return str(caught.value)


def test_a_skipped_call_that_is_like_the_next_is_found(world: Ranks) -> None:
    texts = world.run(_skips, timeout=60)
    for rank in {*range(world.size)} - {1}:
        assert "rank 1 skipped a call: where rank" in texts[rank], texts[rank]
    good(world)


def _message_without_receiver() -> None:
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(AbortedError, match=r"recv #.* timeout of the process group"):
            dist.irecv(torch.zeros(3), 1, tag=3).wait(timedelta(seconds=1))  # type: ignore[union-attr]
    dist.monitored_barrier(KEPT["gloo"])


def test_a_receive_without_a_sender_is_given_up(world: Ranks) -> None:
    world.run(_message_without_receiver, timeout=60)
    good(world)


def _aborts() -> None:
    if dist.get_rank() == 1:
        dist.monitored_barrier(KEPT["gloo"])
        dist.group.WORLD.abort()  # type: ignore[union-attr]
        return
    work = dist.all_reduce(torch.ones(2), async_op=True)
    dist.monitored_barrier(KEPT["gloo"])
    with pytest.raises(AbortedError, match=r"rank 1 called abort\(\)"):
        work.wait()


def test_abort_gives_up_what_is_in_flight(world: Ranks) -> None:
    world.run(_aborts, timeout=60)
    good(world)


def _refuses_while_others_compare() -> float:
    """Rank 1's torch refuses another operation while the comparer asks for the launches."""
    group: Any = dist.group.WORLD
    tensor = torch.ones(2)
    if dist.get_rank() == 1:
        asked = threading.Event()
        usual, inner = group._on_query, group._generation.inner

        def on_query(generation: Any, sender: int, mail: Any) -> None:
            usual(generation, sender, mail)
            if mail.number == generation.counts[mail.channel]:  # not one that was late before
                asked.set()

        def refuse(*args: Any) -> None:
            asked.wait()
            raise ValueError("refused")

        refusing = SimpleNamespace(broadcast=refuse)
        watched.REFUSED_WITHIN, within = 0.5, watched.REFUSED_WITHIN
        group._on_query = on_query
        group._generation.inner = SimpleNamespace(group=refusing, abort=inner.abort, close=inner.close)
        with pytest.raises(ValueError, match="refused"):
            dist.broadcast(tensor, 0)
        group._generation.inner = inner
        del group._on_query
        watched.REFUSED_WITHIN = within
    dist.all_reduce(tensor)
    return float(tensor[0])


def _generation() -> int:
    group: Any = dist.group.WORLD
    return int(group._generation.number)


def test_a_launch_that_torch_refuses_is_not_compared(world: Ranks) -> None:
    before = world.run(_generation)
    assert world.run(_refuses_while_others_compare, timeout=60) == [float(world.size)] * world.size
    good(world)
    assert world.run(_generation) == before


def _backend_fails() -> None:
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        group._generation.inner.abort()
    with pytest.raises(AbortedError, match=r"all_reduce #.*torch's gloo failed on rank \d+: "):
        dist.all_reduce(torch.ones(2))


class _Failed:
    """Torch's object of an operation that has failed already."""

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(RuntimeError("Connection closed by peer"))
        return future


def _fails_as_its_generation_ends() -> None:
    """Rank 1's control thread handles the end of the generation while its launch has failed and is not yet among those in flight."""
    group: Any = dist.group.WORLD
    ended = threading.Event()
    group._engine.on_abort(lambda message: ended.set())
    work = None if dist.get_rank() == 1 else dist.all_reduce(torch.ones(2), async_op=True)
    dist.monitored_barrier(KEPT["gloo"])
    if work is None:
        inner = group._generation.inner
        failing = SimpleNamespace(allreduce=lambda *args, **kwargs: _Failed())
        group._generation.inner = SimpleNamespace(group=failing, abort=inner.abort, close=inner.close)
        group.report_failed = lambda work: group.abort() or ended.wait()
        work = dist.all_reduce(torch.ones(2), async_op=True)
        del group.report_failed
    with pytest.raises(AbortedError, match=r"rank 1 called abort\(\)"):
        work.wait()


def test_a_launch_that_fails_while_its_generation_ends_ends(world: Ranks) -> None:
    world.run(_fails_as_its_generation_ends, timeout=20)
    good(world)


def _is_stuck_after_the_abort(seconds: float) -> None:
    """Rank 1's inner group misses the abort, as Gloo can miss the end of a connection."""
    group: Any = dist.group.WORLD
    dist.monitored_barrier(KEPT["gloo"])
    if dist.get_rank() == 1:
        watched.STUCK_AFTER, usual = seconds, watched.STUCK_AFTER
        inner = group._generation.inner
        stuck = SimpleNamespace(get_future=torch.futures.Future)
        missing = SimpleNamespace(allreduce=lambda *args, **kwargs: stuck)
        group._generation.inner = SimpleNamespace(group=missing, abort=lambda: None, close=inner.close)
        work: Any = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        group.abort()
        with pytest.raises(AbortedError, match=r"rank 1 called abort\(\)"):
            work.wait()
        with pytest.raises(RuntimeError, match=r"AbortedError: .* rank 1 called abort\(\)"):
            future.wait()
        watched.STUCK_AFTER = usual
        inner.abort()


def test_an_operation_that_the_inner_group_does_not_end_ends_some_time_after_the_abort(world: Ranks) -> None:
    world.run(_is_stuck_after_the_abort, 0.1, timeout=20)
    good(world)


def _descriptors() -> list[str]:
    """Return what the descriptors of this process are, without numbers."""
    for thread in threading.enumerate():
        if thread.name == "hvdlab-c10d-dropping":
            thread.join()
    # The connections of the inner group that was aborted last are kept. How many Gloo has closed before the abort finds them depends on the
    # moment; after a good step on all ranks none sends anything in it.
    group: Any = dist.group.WORLD
    group._aborted = None
    gc.collect()  # an error that was caught has its work, in whose frames it was raised
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
    return sorted(kinds)


def _aborts_nothing() -> None:
    if dist.get_rank() == 1:
        dist.group.WORLD.abort()  # type: ignore[union-attr]


def test_inner_groups_that_end_leave_no_descriptors(world: Ranks) -> None:
    good(world)
    world.run(_aborts_nothing, timeout=60)
    good(world)
    before = world.run(_descriptors)
    for _ in range(3):
        world.run(_aborts_nothing, timeout=60)
        good(world)

    def left() -> list[Counter[str]]:
        return [
            Counter(now) - Counter(then) for now, then in zip(world.run(_descriptors), before, strict=True)
        ]

    # Gloo's own thread closes the last connections of a group a moment later, and reports that to no other thread.
    eventually(lambda: not any(left()), left)


def test_a_failure_of_the_backend_that_no_rank_explains_is_shown_on_all(world: Ranks) -> None:
    world.run(_backend_fails, timeout=60)
    good(world)


class _Connecting:
    """Next inner group of one group: rank 0 calls a function when it begins to connect, and rank 1 does not begin before the abort.

    Args:
        timeout: The group's, which no other group has: an end of the generation lets all groups of these ranks make inner groups.
        begun: The function.
    """

    def __init__(self, timeout: timedelta, begun: Callable[[], None]) -> None:
        self._make, self._timeout, self._begun = WATCHED.make_inner, timeout, begun
        self._thread: threading.Thread | None = None
        WATCHED.make_inner = self

    def __call__(self, kind: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        inner: Any = self._make(kind, store, rank, size, timeout)
        if timeout == self._timeout:
            WATCHED.make_inner = self._make
            self._connect, self._abort, self._aborted = inner.connect, inner.abort, threading.Event()
            inner.connect, inner.abort = self._connect_late, self._abort_first
        return inner

    def _connect_late(self) -> None:
        self._thread = threading.current_thread()
        if dist.get_rank() == 0:
            self._begun()
        if dist.get_rank() == 1:
            self._aborted.wait()
        self._connect()

    def _abort_first(self) -> None:
        self._aborted.set()
        self._abort()

    def end(self) -> None:
        """Check that the thread that connects has ended."""
        WATCHED.make_inner = self._make
        if self._thread is not None:
            self._thread.join(GONE)
            assert not self._thread.is_alive()


def _ends_while_it_is_made(timeout: timedelta) -> None:
    """Rank 0 aborts a group, and aborts it again while it connects its next inner group."""
    group: Any = dist.new_group(timeout=timeout)
    connecting, ended = _Connecting(timeout, group.abort), threading.Event()
    context.engine().on_abort(lambda message: ended.set())
    dist.monitored_barrier(KEPT["gloo"])
    if dist.get_rank() == 0:
        group.abort()
    ended.wait()  # a launch before it would be given up, as it should
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    connecting.end()
    dist.destroy_process_group(group)


def test_an_inner_group_whose_generation_ends_while_it_is_made_is_given_up(world: Ranks) -> None:
    world.run(_ends_while_it_is_made, timedelta(minutes=21), timeout=60)
    good(world)


class _InterruptedWait(threading.Event):
    """Event whose wait Ctrl-C ends, once another one is set."""

    def __init__(self, pressed: threading.Event) -> None:
        super().__init__()
        self._pressed = pressed

    def wait(self, timeout: float | None = None) -> bool:
        self._pressed.wait()
        raise KeyboardInterrupt


def _interrupt_making(pressed: threading.Event) -> None:
    """Interrupt the user's thread in place of a signal, which the interpreter may miss, while it waits for the next inner group."""
    usual = WATCHED.Generation

    def generation(number: int) -> Any:
        made = usual(number)
        if number >= 0:
            WATCHED.Generation, made.made = usual, _InterruptedWait(pressed)
        return made

    WATCHED.Generation = generation


def _interrupted_in_new_group(timeout: timedelta) -> None:
    pressed = threading.Event()
    connecting = _Connecting(timeout, pressed.set)
    if dist.get_rank() == 0:
        _interrupt_making(pressed)
        with pytest.raises(KeyboardInterrupt):
            dist.new_group(timeout=timeout)
    else:
        with pytest.raises(AbortedError, match=r"dist\.new_group.*rank 0 was interrupted") as caught:
            dist.new_group(timeout=timeout)
        assert caught.value.cause.kind is CauseKind.INTERRUPTED
    connecting.end()


def _new_group_is_given_up(timeout: timedelta) -> None:
    """Rank 0 aborts the default group, which has the same ranks, while it makes another one."""
    default: Any = dist.group.WORLD
    connecting = _Connecting(timeout, default.abort)
    with pytest.raises(AbortedError, match=r"^dist\.new_group: rank 0 called abort\(\)") as caught:
        dist.new_group(timeout=timeout)
    assert caught.value.cause.kind is CauseKind.WITHDRAWN
    connecting.end()


def test_an_end_of_the_generation_ends_the_making_of_a_group_with_its_cause(world: Ranks) -> None:
    world.run(_new_group_is_given_up, timedelta(minutes=23), timeout=60)
    world.catch_up()
    world.run(_reduces_in_new_group, timeout=60)
    good(world)


def _reduces_in_new_group() -> None:
    total = torch.ones(1)
    group: Any = dist.new_group()
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group(group)


def test_an_interrupt_ends_the_making_of_a_group_on_all_ranks(world: Ranks) -> None:
    world.run(_interrupted_in_new_group, timedelta(minutes=22), timeout=60)
    world.catch_up()
    world.run(_reduces_in_new_group, timeout=60)
    good(world)


def _subgroups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1], pg_options=WatchOptions("watched", "gloo", LATE), group_desc="pair")
    mesh = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["tp"].get_group())
    assert total.item() == 2
    if rank == 0:
        with pytest.raises(
            AbortedError, match=r"all_reduce #1 of group pair \(test_c10d_watched\.py:\d+\): .*timeout"
        ):
            dist.all_reduce(torch.ones(1), group=pair, async_op=True).wait(timedelta(seconds=1))
    dist.monitored_barrier(KEPT["gloo"])
    if rank < 2:
        total = torch.ones(1)
        dist.all_reduce(total, group=pair)
        assert total.item() == 2
        dist.destroy_process_group(pair)


def test_subgroups_and_meshes(world: Ranks) -> None:
    world.run(_subgroups, timeout=60)
    good(world)


def _shards() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain, sharded = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    sharded.load_state_dict(plain.state_dict())
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(sharded, mesh=mesh)
    for model in (plain, sharded):
        model(torch.ones(2, 4)).sum().backward()
    gradient: Any = sharded.weight.grad
    torch.testing.assert_close(gradient.full_tensor(), plain.weight.grad)


def test_fully_shard(world: Ranks) -> None:
    world.run(_shards, timeout=60)


def _other_device() -> float:
    """Operations on tensors of another device than the inner group's are those of an agreed group."""
    group: Any = dist.group.WORLD
    group._device_type = "cuda"
    try:
        total, parts = torch.ones(2), [torch.zeros(2) for _ in range(dist.get_world_size())]
        work: Any = dist.all_reduce(total, async_op=True)
        work.wait()
        assert type(work).__name__ == "HvdlabWork"
        dist.all_gather(parts, total)
        assert all(part.tolist() == total.tolist() for part in parts)
        return float(total[0])
    finally:
        group._device_type = "cpu"


def test_tensors_of_another_device_are_agreed(world: Ranks) -> None:
    assert world.run(_other_device, timeout=60) == [float(world.size)] * world.size
    good(world)


def _destroyed() -> None:
    pair = dist.new_group([0, 1], group_desc="pair")
    if dist.get_rank() < 2:
        assert type(pair).__name__ == "WatchedGroup"  # as the default group is
    if dist.get_rank() == 0:
        work: Any = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
        dist.destroy_process_group(pair)
        with pytest.raises(AbortedError, match=r"all_reduce #1 of group pair .*: the group was destroyed"):
            work.wait()
    dist.monitored_barrier(KEPT["gloo"])
    if dist.get_rank() == 1:
        dist.destroy_process_group(pair)


def test_what_is_in_flight_ends_with_its_group(world: Ranks) -> None:
    world.run(_destroyed, timeout=60)
    good(world)


def _by_device(backend: str) -> tuple[str, str]:
    dist.destroy_process_group()
    kept: list[str] = []
    make = WATCHED.make_inner

    def stands_in(kind: str, *given: Any) -> Any:
        kept.append(kind)
        return make("gloo", *given)

    WATCHED.make_inner = stands_in  # there is no GPU
    try:
        dist.init_process_group(backend)
    finally:
        WATCHED.make_inner = make
    group: Any = dist.group.WORLD
    total = torch.ones(2)
    dist.all_reduce(total)  # tensors of the host are agreed beside NCCL
    assert total[0].item() == dist.get_world_size()
    dist.destroy_process_group()
    _begin()
    return type(group).__name__, "".join(kept)


def test_a_group_has_a_backend_for_each_device(world: Ranks) -> None:
    assert (
        world.run(_by_device, "cpu:hvdlab,cuda:nccl", timeout=60) == [("WatchedGroup", "nccl")] * world.size
    )
    assert (
        world.run(_by_device, "cpu:hvdlab,cuda:hvdlab", timeout=60)
        == [("HvdlabProcessGroup", "")] * world.size
    )
    good(world)


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"watch": "looked at"}, {"inner": "mpi"}, {"late": 0.0}):
        with pytest.raises(InvalidRequestError, match="watch is 'agreed' or 'watched'"):
            WatchOptions(**wrong)


@pytest.mark.parametrize(
    ("variable", "options", "inner"),
    [
        ("", WatchOptions(), ""),
        ("agreed", WatchOptions(), ""),
        ("watched:gloo", WatchOptions(), "gloo"),
        ("watched:gloo", WatchOptions("agreed"), ""),
        ("agreed", WatchOptions("watched", "gloo"), "gloo"),
        ("watched", WatchOptions(), "gloo"),
    ],
)
def test_an_option_of_the_group_goes_before_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, options: WatchOptions, inner: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HVDLAB_C10D_WATCH", variable)
    assert options.inner_backend(HashStore(), 0, 1) == inner


@pytest.mark.parametrize(
    ("gpus", "expected"), [(["a", "b", "c"], "nccl"), (["a", "b", "a"], ""), (["a", "", "c"], "")]
)
def test_groups_of_ranks_without_a_gpu_each_are_agreed(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], expected: str
) -> None:
    found = _chosen_by_threads(monkeypatch, WatchOptions(), gpus)
    assert found == dict.fromkeys(range(3), expected)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(["a", "b", "c"], "nccl"), (["a", "b", "a"], "gloo"), (["a", "", "c"], "gloo")]
)
def test_ranks_of_a_watched_group_choose_one_inner_backend(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], expected: str
) -> None:
    found = _chosen_by_threads(monkeypatch, WatchOptions("watched"), gpus)
    assert found == dict.fromkeys(range(3), expected)


def _chosen_by_threads(
    monkeypatch: pytest.MonkeyPatch, options: WatchOptions, gpus: list[str]
) -> dict[int, str]:
    """Return the inner backend that each of three ranks with these GPUs chooses."""
    monkeypatch.delenv("HVDLAB_C10D_WATCH", raising=False)
    # Three threads stand for the ranks.
    own: Callable[[], str] = lambda: gpus[int(threading.current_thread().name)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(own()))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(watch_options, "gpu_in_use", own)
    store, found = HashStore(), dict[int, str]()
    store.set_timeout(timedelta(seconds=PATIENCE))

    def choose(rank: int) -> None:
        found[rank] = options.inner_backend(store, rank, 3)

    threads = [threading.Thread(target=choose, args=(rank,), name=str(rank)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_variable_that_names_no_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLAB_C10D_WATCH", "seen")
    with pytest.raises(InvalidRequestError, match="HVDLAB_C10D_WATCH='seen'"):
        WatchOptions().inner_backend(HashStore(), 0, 1)


# -- a backward pass whose buckets meet two generations ---------------------------------------------------------------------


def _make_two_buckets() -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 128), torch.nn.Linear(128, 4))
    # After the first step the buckets have the order of the gradients, and stay: of 2.2 and 33 KiB.
    KEPT["two"] = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=4 / 1024)
    for _ in range(2):
        _step_of_two()


def _step_of_two(between: Callable[[], None] = lambda: None) -> list[float]:
    """Make a step; ``between`` is called in the backward pass, once the first bucket was launched."""
    model, rank = KEPT["two"], dist.get_rank()
    model.zero_grad()
    first = model.module[0]
    hidden = []
    hook = first.register_forward_hook(lambda layer, given, output: hidden.append(output))
    try:
        loss = model(torch.full((2, 4), float(rank + 1))).sum()
    finally:
        hook.remove()
    hidden[0].register_hook(lambda grad: between())
    loss.backward()
    return [float(parameter.grad.sum()) for parameter in model.module.parameters()]


def _aborts_between_buckets() -> list[float]:
    """Rank 0 aborts the group between its buckets; rank 1 launches its first one only then."""
    group: Any = dist.group.WORLD
    ended = threading.Event()
    context.engine().on_abort(lambda message: ended.set())
    dist.monitored_barrier(KEPT["gloo"])

    def abort() -> None:
        group.abort()
        ended.wait()

    if dist.get_rank() == 0:
        with pytest.raises((AbortedError, RuntimeError), match="rank 0 called abort"):
            _step_of_two(abort)
    else:
        ended.wait()
    return _step_of_two()


def test_a_bucket_whose_step_was_given_up_meets_no_bucket_of_the_next_generation() -> None:
    # Gloo ends the process that gets a message of another size than it expects.
    with Ranks(2, init=False, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_begin, timeout=60)
        ranks.run(_make_two_buckets, timeout=60)
        for _ in range(2):
            one, other = ranks.run(_aborts_between_buckets, timeout=60)
            assert one == other


# -- a successor of the coordinator ---------------------------------------------------------------------------------------


def _aborts_and_loses(kind: str, rank: int) -> None:
    """Rank 0 aborts the group, and the coordinator dies with the mail of one rank on which the next inner group depends."""
    group: Any = dist.group.WORLD
    usual, lost, ended = group._send, threading.Event(), threading.Event()

    def send(mail: Any, to: Any) -> None:
        if type(mail).__name__ != kind or dist.get_rank() != rank:
            usual(mail, to)
            return
        del group._send
        if dist.get_rank() in to:
            usual(mail, [dist.get_rank()])
        lost.set()

    if dist.get_rank() == rank:
        group._send = send
    context.engine().on_abort(lambda message: ended.set())
    dist.monitored_barrier(KEPT["gloo"])
    if dist.get_rank() == 0:
        group.abort()
    ended.wait()
    if dist.get_rank() == rank:
        lost.wait()


@pytest.mark.parametrize(("kind", "rank"), [("InnerEnded", 1), ("MakeInner", 0)])
def test_the_next_inner_group_is_made_although_the_coordinator_dies_with_the_mail_for_it(
    kind: str, rank: int
) -> None:
    with Ranks(2, init=False, imports=["hvdlab.torch"], keep=True) as ranks:
        ranks.run(_begin, timeout=60)
        ranks.run(_aborts_and_loses, kind, rank, timeout=60)
        os.kill(ranks.coordinator.pid, signal.SIGKILL)
        ranks.coordinator.respawn(PATIENCE)
        assert len(set(ranks.run(_good, timeout=60))) == 1


def _gives_up_and_loses(coordinator: int) -> None:
    """Rank 0 gives up a wait for rank 1, and the coordinator dies before it has read the request."""
    if dist.get_rank() == 0:
        engine: Any = context.engine()
        usual = engine.withdraw

        def withdraw(*arguments: Any) -> None:
            del engine.withdraw
            usual(*arguments)
            os.kill(coordinator, signal.SIGKILL)

        engine.withdraw = withdraw
        os.kill(coordinator, signal.SIGSTOP)
        with pytest.raises(AbortedError, match=r"all_reduce #\d+ .*timeout of the process group"):
            dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=1))
    dist.monitored_barrier(KEPT["gloo"], timedelta(seconds=PATIENCE))


def test_a_wait_is_given_up_although_the_coordinator_dies_with_the_request() -> None:
    with Ranks(2, init=False, imports=["hvdlab.torch"], keep=True) as ranks:
        ranks.run(_begin, timeout=60)
        killed = os.pidfd_open(ranks.coordinator.pid)
        try:
            given_up = ranks.start(_gives_up_and_loses, ranks.coordinator.pid)
            assert select.select([killed], [], [], PATIENCE)[0]
        finally:
            os.close(killed)
        ranks.coordinator.respawn(PATIENCE)
        given_up.results(60)
        assert len(set(ranks.run(_good, timeout=60))) == 1

"""``torch.distributed`` on hvdlab: every operation against the Gloo backend on the same ranks, groups, failures."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)
from hvdlab.collectives.errors import (
    AbortedError,
    InvalidRequestError,
    MismatchError,
    UnsupportedError,
)
from hvdlab.torch.c10d import submission
from support.ranks.resident import Ranks

ROOT = Path(__file__).parents[3]
Tensors = list[torch.Tensor]
Group = Any


def _begin() -> None:
    """Make hvdlab's default group, and beside it a group of Gloo's."""
    dist.init_process_group("hvdlab")
    _GROUPS["gloo"] = dist.new_group(backend="gloo")


_GROUPS: dict[str, Group] = {}


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, init=False, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


@pytest.fixture(scope="module", params=[2, 3])
def watched(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Yield a world whose groups have Gloo inside and are watched."""
    env = {"HVDLAB_C10D_WATCH": "watched:gloo"}
    with Ranks(request.param, init=False, imports=["hvdlab.torch"], env=env) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers that differ between ranks, and which every dtype holds exactly."""
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def _total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return cast(torch.Tensor, sum(tensors))


# -- the matrix -------------------------------------------------------------------------------------------------------


def _all_reduce(op: Any, dtype: torch.dtype) -> Callable[[Group, int, int], Tensors]:
    def case(group: Group, rank: int, size: int) -> Tensors:
        tensor = values(rank, 3, 4, dtype=dtype)
        dist.all_reduce(tensor, op=op, group=group)
        return [tensor]

    return case


def _transposed(group: Group, rank: int, size: int) -> Tensors:
    tensor = values(rank, 3, 4)
    dist.all_reduce(tensor.t(), group=group)
    return [tensor]


def _asynchronous(group: Group, rank: int, size: int) -> Tensors:
    tensors = [values(rank + i, 5) for i in range(10)]
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()
        assert work.is_completed()
    return tensors


def _future(group: Group, rank: int, size: int) -> Tensors:
    work = dist.all_reduce(values(rank, 5), group=group, async_op=True)
    value = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    return [value]


def _broadcast(dtype: torch.dtype) -> Callable[[Group, int, int], Tensors]:
    def case(group: Group, rank: int, size: int) -> Tensors:
        tensors = []
        for root in range(size):
            tensor = values(rank, 2, 3, dtype=dtype).t()
            dist.broadcast(tensor, root, group=group)
            tensors.append(tensor)
        return tensors

    return case


def _gathers(dtype: torch.dtype) -> Callable[[Group, int, int], Tensors]:
    def case(group: Group, rank: int, size: int) -> Tensors:
        given = values(rank, 2, 3, dtype=dtype)
        outputs = [torch.zeros_like(given) for _ in range(size)]
        dist.all_gather(outputs, given, group=group)
        whole = torch.zeros(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(whole, given, group=group)
        return [*outputs, whole]

    return case


def _to_root(group: Group, rank: int, size: int) -> Tensors:
    found: Tensors = []
    for root in range(size):
        given = values(rank, 4)
        outputs = [torch.zeros(4) for _ in range(size)] if rank == root else None
        dist.gather(given, outputs, dst=root, group=group)
        dist.reduce(given, root, group=group)
        output = torch.zeros(4)
        dist.scatter(output, outputs, src=root, group=group)
        found += [*(outputs or []), output, *([given] if rank == root else [])]
    return found


def _reduce_scatters(group: Group, rank: int, size: int) -> Tensors:
    output, single = torch.zeros(3), torch.zeros(2, 3)
    dist.reduce_scatter(output, [values(rank + i, 3) for i in range(size)], group=group)
    dist.reduce_scatter_tensor(single, values(rank, 2 * size, 3), op=dist.ReduceOp.MAX, group=group)
    return [output, single]


def _exchanges(dtype: torch.dtype) -> Callable[[Group, int, int], Tensors]:
    def case(group: Group, rank: int, size: int) -> Tensors:
        even = torch.zeros(2 * size, 2, dtype=dtype)
        dist.all_to_all_single(even, values(rank, 2 * size, 2, dtype=dtype), group=group)
        sends = [(rank + to) % 3 for to in range(size)]
        receives = [(rank + of) % 3 for of in range(size)]
        uneven = torch.zeros(sum(receives), 2, dtype=dtype)
        given = values(rank, sum(sends), 2, dtype=dtype)
        dist.all_to_all_single(uneven, given, receives, sends, group=group)
        return [even, uneven]

    return case


def _objects(group: Group, rank: int, size: int) -> Tensors:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank}, group=group)
    assert everyone == [{"rank": each, "text": "x" * each} for each in range(size)]
    sent = [f"from {rank}", rank]
    dist.broadcast_object_list(sent, src=size - 1, group=group)
    assert sent == [f"from {size - 1}", size - 1]
    one: list[Any] = [None]
    dist.scatter_object_list(one, [f"to {each}" for each in range(size)], src=0, group=group)
    assert one == [f"to {rank}"]
    dist.barrier(group=group)
    return []


def _point_to_point(group: Group, rank: int, size: int) -> Tensors:
    after, before = (rank + 1) % size, (rank - 1) % size
    first, second, ring = torch.zeros(3), torch.zeros(2, dtype=torch.int16), torch.zeros(4)
    # Each rank receives the tags in the other order.
    works = [
        dist.isend(values(rank, 3), after, group=group, tag=1),
        dist.isend(values(rank, 2, dtype=torch.int16), after, group=group, tag=2),
        dist.irecv(second, before, group=group, tag=2),
        dist.irecv(first, before, group=group, tag=1),
    ]
    for work in works:
        assert work is not None
        work.wait()
    operations = [
        dist.P2POp(dist.isend, values(rank, 4), after, group=group),
        dist.P2POp(dist.irecv, ring, before, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank == 0:
        dist.send(ring, 1, group=group)
    elif rank == 1:
        dist.recv(ring, 0, group=group)
    own = group or dist.group.WORLD
    assert own is not None
    named = torch.zeros(1)
    if rank == 0:
        own.send([torch.ones(1)], dstRank=1, tag=3).wait()
    elif rank == 1:
        own.recv([named], srcRank=0, tag=3).wait()
        assert named.item() == 1
    return [first, second, ring]


def _any_source(group: Group, rank: int, size: int) -> Tensors:
    """Receive on rank 0 from all others, in any order, with two tags; the messages' sum does not depend on the
    order."""
    found: Tensors = []
    for tag in (5, 6):
        if rank:
            works = [dist.isend(values(rank + i, 3), 0, group=group, tag=tag) for i in range(2)]
            for work in works:
                assert work is not None
                work.wait()
        else:
            outputs, sources = [torch.zeros(3) for _ in range(2 * (size - 1))], []
            for output in outputs[:-1]:
                sources.append(dist.recv(output, group=group, tag=tag))
            last = dist.irecv(outputs[-1], group=group, tag=tag)
            assert last is not None
            last.wait()
            assert last.is_completed()
            sources.append(last._source_rank())
            assert sorted(sources) == sorted(2 * list(range(1, size)))
            seen: dict[int, int] = {}
            for source, output in zip(sources, outputs, strict=True):
                # Messages of one rank arrive in the order in which it sent them.
                assert torch.equal(output, values(source + seen.get(source, 0), 3))
                seen[source] = seen.get(source, 0) + 1
            found.append(torch.stack(outputs).sum(0))
    # A receive that names its source gets a message before an older receive that names none.
    if rank == 1:
        dist.send(torch.tensor([1.0]), 0, group=group, tag=5)
        dist.send(torch.tensor([2.0]), 0, group=group, tag=5)
    elif rank == 0:
        one, two = torch.zeros(1), torch.zeros(1)
        dist.recv(one, 1, group=group, tag=5)
        assert dist.recv(two, group=group, tag=5) == 1
        found += [one, two]
    return found


def _sparse(group: Group, rank: int, size: int) -> Tensors:
    """Each rank has other indices, the last rank none at all; with dense dimensions, and values that are not coalesced."""
    found = []
    for dense in ((), (2,)):
        count = 0 if rank == size - 1 else 3
        indices = torch.tensor([[rank, 0, rank], [1, 2, 1]])[:, :count]
        tensor = torch.sparse_coo_tensor(indices, values(rank, count, *dense), (size + 1, 3, *dense))
        dist.all_reduce(tensor, group=group)
        assert tensor.is_coalesced()
        found += [tensor.to_dense(), tensor.indices()]
    return found


def _coalesced(group: Group, rank: int, size: int) -> Tensors:
    tensors = [values(rank, 3), values(rank, 2, 2)]
    dist.all_reduce_coalesced(tensors, group=group)
    outputs = [[torch.zeros(3), torch.zeros(2)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [values(rank, 3), values(rank, 2)], group=group)
    return [*tensors, *(output for row in outputs for output in row)]


def _empty(group: Group, rank: int, size: int) -> Tensors:
    nothing = torch.zeros(0)
    dist.all_reduce(nothing, group=group)
    dist.broadcast(nothing, 0, group=group)
    return [nothing]


OPS = dist.ReduceOp
MATRIX: dict[str, Callable[[Group, int, int], Tensors]] = {
    **{
        f"all_reduce {name} {dtype}": _all_reduce(op, dtype)
        for name, op in {"sum": OPS.SUM, "min": OPS.MIN, "max": OPS.MAX, "product": OPS.PRODUCT}.items()
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8)
    },
    **{
        f"all_reduce {name}": _all_reduce(op, torch.int32)
        for name, op in {"band": OPS.BAND, "bor": OPS.BOR, "bxor": OPS.BXOR}.items()
    },
    "all_reduce complex": _all_reduce(OPS.SUM, torch.complex64),
    "not contiguous": _transposed,
    "asynchronous": _asynchronous,
    "future": _future,
    **{f"broadcast {d}": _broadcast(d) for d in (torch.float32, torch.bool, torch.complex64)},
    **{f"all_gather {d}": _gathers(d) for d in (torch.float32, torch.int64, torch.complex64)},
    "root": _to_root,
    "reduce_scatter": _reduce_scatters,
    **{f"all_to_all {d}": _exchanges(d) for d in (torch.float32, torch.int64)},
    "objects": _objects,
    "point to point": _point_to_point,
    "any source": _any_source,
    "sparse": _sparse,
    "coalesced": _coalesced,
    "empty": _empty,
}


def _differences(without: str = "") -> list[str]:
    """Return the cases of the matrix whose results differ from Gloo's; one of them may be left out."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for name, case in MATRIX.items():
        if name == without:
            continue
        outcomes = []
        groups: tuple[Group, Group] = (_GROUPS["gloo"], dist.group.WORLD)
        for group in groups:
            try:
                outcomes.append(case(group, rank, size))
            except Exception as error:  # noqa: BLE001  (the test shows it with the case's name)
                found.append(f"{name} of {group.name()}: {type(error).__name__}: {error}")
        if len(outcomes) < 2:
            continue
        reference, ours = outcomes
        if not all(torch.equal(a, b) for a, b in zip(reference, ours, strict=True)):
            found.append(f"{name}: {ours}, and Gloo {reference}")
    return found


def _wrong_calls(group: Group, rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Calls that each rank can find wrong by itself."""
    ones, other = torch.ones(3), torch.ones(3, dtype=torch.int64)
    outputs = [torch.zeros(3) for _ in range(size)]
    return {
        "root": lambda: dist.broadcast(ones, size, group=group),
        "bitwise float": lambda: dist.all_reduce(ones, op=OPS.BAND, group=group),
        "sparse max": lambda: dist.all_reduce(torch.eye(2).to_sparse(), op=OPS.MAX, group=group),
        "sparse broadcast": lambda: dist.broadcast(torch.eye(2).to_sparse(), 0, group=group),
        "few outputs": lambda: dist.all_gather(outputs[:-1], ones, group=group),
        "outputs' dtype": lambda: dist.all_gather(outputs, other, group=group),
        "few parts": lambda: dist.reduce_scatter(ones, outputs[:-1], group=group),
        "size": lambda: dist.all_gather_into_tensor(torch.zeros(3 * size + 1), ones, group=group),
        "dtype": lambda: dist.all_gather_into_tensor(torch.zeros(3 * size), other, group=group),
        "splits": lambda: dist.all_to_all_single(
            torch.zeros(4), torch.zeros(4), [1] * size, [4] * size, group=group
        ),
        "rows": lambda: dist.all_to_all_single(torch.zeros(5 - size), torch.zeros(5 - size), group=group),
        "few lists": lambda: dist.all_to_all(outputs[:-1], outputs[:-1], group=group),
        "gather": lambda: dist.gather(ones, outputs[:-1] if rank == 0 else None, dst=0, group=group),
        "to oneself": lambda: dist.send(ones, rank, group=group),
        "no tensor": lambda: dist.all_reduce([1.0], group=group),
    }


def _other_errors() -> list[str]:
    """Return the wrong calls that raise an error that code written for Gloo would not catch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for name in _wrong_calls(None, rank, size):
        kinds: list[type[Exception] | None] = []
        for group in (_GROUPS["gloo"], dist.group.WORLD):
            if name == "gather" and rank:  # only the root can find it wrong
                continue
            try:
                _wrong_calls(group, rank, size)[name]()
                kinds.append(None)
            except Exception as error:  # noqa: BLE001  (the test compares its type)
                kinds.append(type(error))
        if kinds and kinds[0] is not None and not (kinds[1] is not None and issubclass(kinds[1], kinds[0])):
            found.append(f"{name}: {kinds[1]} in place of {kinds[0]}")
    # Gloo's barrier, which is also that of a watched group, raises the error of the call before it as long as a thread of Gloo's has not
    # let go of that: the exchange of messages before it takes longer.
    dist.monitored_barrier(_GROUPS["gloo"])
    dist.barrier()
    return found


def test_every_operation_is_as_with_gloo(world: Ranks) -> None:
    assert world.run(_differences, timeout=120) == [[]] * world.size


def test_every_operation_of_a_watched_group_is_as_with_gloo(watched: Ranks) -> None:
    assert watched.run(_differences, "any source", timeout=120) == [[]] * watched.size


def _from_any() -> None:
    with pytest.raises(InvalidRequestError, match="a watched group has no receives from any rank"):
        dist.recv(torch.zeros(1))
    dist.barrier()


def test_a_watched_group_refuses_receives_from_any_rank(watched: Ranks) -> None:
    watched.run(_from_any, timeout=60)


def test_wrong_calls_in_a_watched_group_raise_what_gloo_raises(watched: Ranks) -> None:
    assert watched.run(_other_errors, timeout=60) == [[]] * watched.size


def test_wrong_calls_raise_what_gloo_raises(world: Ranks) -> None:
    assert world.run(_other_errors, timeout=60) == [[]] * world.size


def _profiled(group: Group) -> list[tuple[str, bool, list[list[int]], int]]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensor, outputs = torch.ones(3, 4), [torch.zeros(3, 4) for _ in range(size)]
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 0, group=group, async_op=True).wait()
        dist.all_gather(outputs, tensor, group=group)
        dist.reduce(tensor, 0, group=group)
        dist.gather(tensor, outputs if rank == 0 else None, group=group)
        dist.scatter(tensor, outputs if rank == 0 else None, group=group)
        dist.all_to_all_single(torch.zeros(size), torch.ones(size), group=group)
        dist.barrier(group=group)
        if rank == 0:
            dist.send(tensor, 1, group=group)
        elif rank == 1:
            dist.recv(tensor, group=group)
    prefix = f"{group.name()}:"
    events = [event for event in profile.function_events if event.name.startswith(prefix)]
    return [
        (event.name.removeprefix(prefix), event.is_async, event.input_shapes, event.count) for event in events
    ]


def _profiles_differ() -> list[Any]:
    ours, reference = _profiled(dist.group.WORLD), _profiled(_GROUPS["gloo"])
    return [] if sorted(ours) == sorted(reference) else [ours, reference]


def _many_are_profiled() -> int:
    with torch.autograd.profiler.profile() as profile:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(100)]
        for future in [work.get_future() for work in works]:
            future.wait()
    return sum(event.name == "hvdlab:all_reduce" for event in profile.function_events)


def test_more_futures_may_end_at_once_than_there_are_threads_while_a_profiler_runs(world: Ranks) -> None:
    assert world.run(_many_are_profiled, timeout=60) == [100] * world.size


def test_profilers_show_operations_as_they_show_gloos(world: Ranks) -> None:
    assert world.run(_profiles_differ, timeout=60) == [[]] * world.size


def _unsorted() -> list[str]:
    """Return the differences from Gloo in the matrix, on groups whose ranks are not in ascending order."""
    found = []
    ranks = list(range(dist.get_world_size()))
    for order in {tuple(ranks[::-1]), (*ranks[1:], ranks[0])}:
        ours = dist.new_group(list(order), sort_ranks=False)
        reference = dist.new_group(list(order), backend="gloo", sort_ranks=False)
        rank = dist.get_rank(ours)
        assert order[rank] == dist.get_rank()
        for name in (
            "all_gather torch.float32",
            "uneven",
            "reduce_scatter",
            "all_to_all torch.int64",
            "groups' roots",
        ):
            case = {**MATRIX, "uneven": _uneven, "groups' roots": _group_roots}[name]
            for a, b in zip(case(reference, rank, len(order)), case(ours, rank, len(order)), strict=True):
                if not torch.equal(a, b):
                    found.append(f"{name} {order}: {b}, and Gloo {a}")
    return found


def _aborted() -> None:
    """Rank 1 gives up operations that rank 0 waits for: one of the group, and a message between the two."""
    rank = dist.get_rank()
    tensor = torch.ones(2)
    if rank == 0:
        dist.send(tensor, 1)
        works = [dist.irecv(tensor, 1), dist.all_reduce(tensor, async_op=True)]
        _GROUPS["gloo"].barrier().wait()
        for work in works:
            with pytest.raises(AbortedError, match=r"rank 1 called abort\(\)"):
                work.wait()
    else:
        if rank == 1:
            dist.recv(tensor, 0)
        _GROUPS["gloo"].barrier().wait()
        if rank == 1:
            dist.group.WORLD.abort()  # type: ignore[union-attr]
    _GROUPS["gloo"].barrier().wait()


def test_abort_gives_up_messages_as_well(world: Ranks) -> None:
    world.run(_aborted, timeout=60)
    world.catch_up()
    world.run(dist.barrier, timeout=60)


def _skips() -> str:
    """Rank 1 skips a call that is like the one after it; its next calls are then matched with the wrong ones."""
    rank = dist.get_rank()
    _meet()
    works = []
    for step in range(4):
        works.append(dist.all_reduce(torch.ones(2), async_op=True))
        if rank != 1 or step != 1:
            works.append(dist.all_reduce(torch.ones(2), async_op=True))
    if rank == 1:
        for work in works:
            work.wait()
        dist.monitored_barrier(_GROUPS["gloo"])
        return ""
    for work in works[:-1]:
        work.wait()
    with pytest.raises(AbortedError) as caught:
        works[-1].wait(timedelta(seconds=0.2))
    dist.monitored_barrier(_GROUPS["gloo"])
    return str(caught.value)


def test_a_skipped_call_that_is_like_the_next_is_found(world: Ranks) -> None:
    texts = world.run(_skips, timeout=60)
    world.catch_up()
    for rank in {*range(world.size)} - {1}:
        assert re.search(
            rf"rank 1 skipped a call: where rank {rank} called all_reduce #\d+ \(test_c10d.py:\d+\), it called all_reduce #\d+ "
            r"\(test_c10d.py:\d+\), and the calls behind that met the wrong ones",
            texts[rank],
        ), texts[rank]


def _late_message() -> None:
    """Check that a receive that takes too long is given up alone: other operations that are in flight in the group go
    on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, value = torch.ones(2), torch.zeros(3)
    if rank == 0:
        work = dist.all_reduce(total, async_op=True)
        with pytest.raises(AbortedError, match=r"recv #.* timeout of the process group") as late:
            dist.irecv(value, 1, tag=3).wait(timedelta(seconds=0.1))  # type: ignore[union-attr]  # the rank is in the group
        assert late.value.pending.missing == (1,)
    dist.monitored_barrier(_GROUPS["gloo"])
    if rank:
        work = dist.all_reduce(total, async_op=True)
    work.wait()
    assert total[0] == size
    if rank == 1:
        dist.send(torch.full((3,), 4.0), 0, tag=3)
    elif rank == 0:
        dist.recv(value, 1, tag=3)
        assert value.tolist() == [4.0] * 3


def test_a_message_that_takes_too_long_is_given_up_alone(world: Ranks) -> None:
    world.run(_late_message, timeout=60)


MANY = 40
"""More than there are threads on which futures end."""


def _many_from_any() -> list[float]:
    """Rank 0 asks for the futures of receives from any rank before there is a message for one."""
    rank = dist.get_rank()
    if rank == 0:
        outputs = [torch.zeros(1) for _ in range(MANY)]
        works = [dist.irecv(output, tag=11) for output in outputs]
        futures = [work.get_future() for work in works]  # type: ignore[union-attr]
        total = dist.all_reduce(torch.ones(1), async_op=True)
        dist.send(torch.ones(1), 1, tag=12)
        values = [future.wait()[0].item() for future in futures]
        assert total.get_future().wait()[0].item() == dist.get_world_size()
        assert [work._source_rank() for work in works] == [1] * MANY  # type: ignore[union-attr]
        return values
    if rank == 1:
        dist.recv(torch.zeros(1), 0, tag=12)
        for value in range(MANY):
            dist.send(torch.full((1,), float(value)), 0, tag=11)
    dist.all_reduce(torch.ones(1))
    return []


def test_more_receives_from_any_rank_than_threads_have_futures(world: Ranks) -> None:
    assert world.run(_many_from_any, timeout=60)[0] == [float(value) for value in range(MANY)]


def _one_from_any_fails() -> None:
    """Check that a failure on this rank alone, such as a lack of memory, is raised by the call, and later receives get
    the messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, tag=13)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "writable_array", _lacks_memory)
        with pytest.raises(MemoryError, match="no memory left"):
            dist.irecv(torch.zeros(2), tag=13).wait()  # type: ignore[union-attr]
    outputs = [torch.zeros(2) for _ in range(size - 1)]
    sources = []
    for output in outputs:
        work = dist.irecv(output, tag=13)
        work.wait()  # type: ignore[union-attr]
        sources.append(work._source_rank())  # type: ignore[union-attr]
    assert sorted(sources) == list(range(1, size))
    assert [output[0].item() for output in outputs] == sources


def _lacks_memory(tensor: torch.Tensor) -> None:
    raise MemoryError("no memory left")


def test_an_error_of_one_receive_from_any_rank_does_not_hold_up_others(world: Ranks) -> None:
    world.run(_one_from_any_fails, timeout=60)


def _group_roots(group: Group, rank: int, size: int) -> Tensors:
    found: Tensors = []
    for root in range(size):
        given = values(rank, 4)
        outputs = [torch.zeros(4) for _ in range(size)] if rank == root else None
        dist.gather(given, outputs, group_dst=root, group=group)
        output = torch.zeros(4)
        dist.scatter(output, outputs, group_src=root, group=group)
        dist.broadcast(given, group_src=root, group=group)
        found += [*(outputs or []), output, given]
    return found


def _uneven(group: Group, rank: int, size: int) -> Tensors:
    """Lists of tensors of different sizes: member m gets m + 1 elements from each rank."""
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    inputs = [torch.full((to + 1,), float(rank)) for to in range(size)]
    if group.name() == "gloo":  # Gloo has no all_to_all of lists, so this is the known result
        return [torch.full((rank + 1,), float(of)) for of in range(size)]
    dist.all_to_all(outputs, inputs, group=group)
    return outputs


def test_groups_in_any_order_of_ranks(world: Ranks) -> None:
    assert world.run(_unsorted, timeout=60) == [[]] * world.size


def _beyond_gloo() -> None:
    """Call operations that Gloo lacks: averages, scaled sums, further dtypes for moving data, uneven lists, coalesced
    forms, truth values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = range(size)
    mean, scaled, truth = values(rank, 4), values(rank, 4), torch.tensor([rank == 0, False])
    dist.all_reduce(mean, op=OPS.AVG)
    dist.all_reduce(scaled, op=_make_nccl_premul_sum(0.5))
    dist.all_reduce(truth)
    whole = _total(values(each, 4) for each in ranks)
    torch.testing.assert_close(mean, whole / size)
    assert torch.equal(scaled, whole * 0.5)
    assert truth.tolist() == [True, False]
    strided = values(rank, 8)
    dist.all_reduce(strided[::2])  # Gloo takes elements in between instead
    expected = values(rank, 8)
    expected[::2] = _total(values(each, 8) for each in ranks)[::2]
    assert torch.equal(strided, expected)
    brain = values(rank, 4).bfloat16()
    dist.all_reduce(brain)
    assert torch.equal(brain, whole.bfloat16())
    for dtype in (
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.complex128,
        torch.bfloat16,
    ):
        given = values(rank, 2, 3).to(dtype)
        outputs = [torch.zeros(2, 3).to(dtype) for _ in ranks]
        dist.all_gather(outputs, given)
        lists = [torch.zeros(2, 3).to(dtype) for _ in ranks]
        dist.all_to_all(lists, [given] * size)
        dist.broadcast(given, size - 1)
        for each in ranks:
            expected = values(each, 2, 3).to(dtype).view(torch.uint8)
            assert all(torch.equal(found[each].view(torch.uint8), expected) for found in (outputs, lists))
        assert torch.equal(given.view(torch.uint8), outputs[-1].view(torch.uint8))
    uneven = [torch.zeros(each + 1) for each in ranks]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in uneven] == [[float(each)] * (each + 1) for each in ranks]
    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [torch.full((each + 1,), float(rank)) for each in ranks])
    assert part.tolist() == [sum(ranks)] * (rank + 1)
    several = [values(rank, 2), values(rank, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in several:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t.tolist() for t in several] == [_total(values(e, n) for e in ranks).tolist() for n in (2, 3)]
    # With a device the manager gathers all operations that are called, messages as well.
    ring, mixed = torch.zeros(3), values(rank, 2)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(values(rank, 3), (rank + 1) % size)
        dist.irecv(ring, (rank - 1) % size)
        dist.broadcast(mixed, 0)
    (work,) = manager.works
    assert len(work.get_future().wait()) == 3
    work.wait()
    assert work.is_completed()
    assert work.exception() is None
    assert torch.equal(ring, values((rank - 1) % size, 3))
    assert torch.equal(mixed, values(0, 2))


def _reductions_of_conjugates() -> None:
    """Reduce into tensors with the conjugate or the negative bit, of which Gloo takes none: the bits are no other values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [torch.complex(values(each, 4), values(each + size, 4)) for each in range(size)]
    whole_sum = torch.stack(given).sum(0)
    expected = whole_sum.conj().resolve_conj()
    whole, odd, root = (given[rank].clone().conj() for _ in range(3))
    group: Any = dist.group.WORLD  # torch refuses conjugates in dist.all_reduce() itself
    group.allreduce([whole]).wait()
    group.allreduce([odd[1::2]]).wait()
    dist.reduce(root, 0)
    assert torch.equal(whole, expected)
    assert torch.equal(odd[1::2], expected[1::2])
    assert torch.equal(odd[::2], given[rank].conj()[::2])
    assert torch.equal(root, expected if rank == 0 else given[rank].conj())
    imaginary, negative = given[rank].clone().conj().imag, torch._neg_view(given[rank].clone())
    dist.all_reduce(imaginary)
    dist.all_reduce(negative)
    assert torch.equal(imaginary, expected.imag)
    assert torch.equal(negative, -whole_sum)
    part, listed = (torch.zeros(4, dtype=torch.complex64).conj() for _ in range(2))
    dist.reduce_scatter_tensor(part, torch.cat([given[rank].conj()] * size))
    dist.reduce_scatter(listed, [given[rank].conj()] * size)
    assert torch.equal(part, expected)
    assert torch.equal(listed, expected)


def test_reduced_conjugates_get_the_result(world: Ranks) -> None:
    world.run(_reductions_of_conjugates, timeout=60)


def _functional() -> None:
    from torch.distributed import _functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    whole = _total(values(each, size) for each in range(size))
    assert torch.equal(functional.all_reduce(values(rank, size), "sum", dist.group.WORLD) + 0, whole)
    shard = functional.reduce_scatter_tensor(values(rank, size), "sum", 0, dist.group.WORLD)
    assert torch.equal(functional.all_gather_tensor(shard, 0, dist.group.WORLD) + 0, whole)


WRONG_CALLS: dict[str, Callable[[Group, int, int], object]] = {
    # Errors in the words of torch's own backends, by calls on a group itself and by dist.* on the default group.
    "invalid root rank: ": lambda group, rank, size: group.broadcast([torch.ones(1)], _root_options(size)),
    "invalid root tensor: ": lambda group, rank, size: group.broadcast([torch.ones(1)], _root_options(0, 1)),
    "requires a single-element tensor list": lambda group, rank, size: group.broadcast(
        [torch.ones(1)] * 2, _root_options(0)
    ),
    "only supports dense tensors": lambda group, rank, size: dist.broadcast(torch.eye(2).to_sparse(), 0),
    "Cannot use ReduceOp.BXOR with non-integral dtype": lambda group, rank, size: dist.all_reduce(
        torch.ones(1), op=OPS.BXOR
    ),
    "requires a single-element input tensor list": lambda group, rank, size: group.allgather(
        [[torch.zeros(1)] * size] * 2, [torch.ones(1)] * 2
    ),
    "invalid output tensor list at index 0": lambda group, rank, size: dist.all_gather(
        [torch.zeros(1)] * (size + 1), torch.ones(1)
    ),
    "invalid tensor type at index 0": lambda group, rank, size: group.allgather(
        [[torch.zeros(1, dtype=torch.int32)] * size], [torch.ones(1)]
    ),
    "invalid tensor size at index": lambda group, rank, size: dist.all_gather(
        [torch.zeros(2)] * size, torch.ones(1)
    ),
    "requires non-empty tensor list": lambda group, rank, size: group.allgather_coalesced([], []),
    "requires empty output on non-root": lambda group, rank, size: group.gather(
        [[torch.zeros(1)] * size], [torch.ones(1)], _root_options((rank + 1) % size, of=dist.GatherOptions)
    ),
    "Incorrect output list size": lambda group, rank, size: group.gather(
        [[torch.zeros(1)] * (size + 1)], [torch.ones(1)], _root_options(rank, of=dist.GatherOptions)
    ),
    "requires empty input on non-root": lambda group, rank, size: group.scatter(
        [torch.ones(1)], [[torch.zeros(1)] * size], _root_options((rank + 1) % size, of=dist.ScatterOptions)
    ),
    "Incorrect input list size": lambda group, rank, size: group.scatter(
        [torch.ones(1)], [[torch.zeros(1)] * (size + 1)], _root_options(rank, of=dist.ScatterOptions)
    ),
    "Tensor's dim 0 does not divide equally across group size": lambda group, rank, size: (
        dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))
    ),
    "Number of tensor splits not equal to group size": lambda group, rank, size: dist.all_to_all_single(
        torch.zeros(size), torch.zeros(size), [1] * (size + 1)
    ),
    "Split sizes doesn't match total dim 0 size": lambda group, rank, size: dist.all_to_all_single(
        torch.zeros(size), torch.zeros(size), [2] * size
    ),
    "invalid rank: ": lambda group, rank, size: dist.send(torch.ones(1), size),
    "Tag must be nonnegative": lambda group, rank, size: dist.recv(torch.ones(1), (rank + 1) % size, tag=-1),
}


def _root_options(root: int, tensor: int = 0, of: Any = dist.BroadcastOptions) -> Any:
    options = of()
    options.rootRank = root
    if tensor:
        options.rootTensor = tensor
    return options


def _told_otherwise() -> list[str]:
    """Return the words that are missing in the error of their wrong call. Nothing is sent, so the group goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for words, call in WRONG_CALLS.items():
        try:
            call(dist.group.WORLD, rank, size)
        except InvalidRequestError as error:
            if words not in str(error):
                found.append(f"{words}: {error}")
        else:
            found.append(f"{words}: nothing")
    dist.barrier()
    return found


def test_wrong_calls_are_told_in_the_words_of_torchs_backends(world: Ranks) -> None:
    assert world.run(_told_otherwise, timeout=60) == [[]] * world.size


def test_what_gloo_has_not_and_functional_collectives(world: Ranks) -> None:
    world.run(_beyond_gloo, timeout=60)
    world.run(_functional, timeout=60)


# -- groups -----------------------------------------------------------------------------------------------------------


def _groups(path: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Only members make these groups: the last two ranks and the first two, in any order; rank 1 of 3 is in both.
    last, first = [size - 2, size - 1], [1, 0]
    for ranks in (last, first) if rank == size - 1 else (first, last):
        if rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"of {sorted(ranks)}")
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor[0] == sum(ranks)
            if rank == max(ranks):
                broken = pytest.raises(MismatchError, match=r"broadcast #2 of group of \[")
                with broken:
                    dist.broadcast(tensor, max(ranks), group=group)
            else:
                with pytest.raises(MismatchError, match=r"all_reduce #2 of group of \["):
                    dist.all_reduce(tensor, group=group)
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    dist.barrier()
    with pytest.raises(InvalidRequestError, match="destroyed"):
        group.allreduce([tensor])


def _again(path: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("hvdlab", store=FileStore(path, size), rank=rank, world_size=size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor[0] == size
    _GROUPS["gloo"] = dist.new_group(backend="gloo")


def test_groups_by_members_alone_and_once_more(world: Ranks, tmp_path: Path) -> None:
    world.run(_groups, str(tmp_path / "file"), timeout=60)
    world.run(_again, str(tmp_path / "file"), timeout=60)


# -- failures ---------------------------------------------------------------------------------------------------------


def _meet() -> None:
    """Return once all ranks know the operation that one of them has given up: the others may learn of it only in their
    next operation."""
    while True:
        with contextlib.suppress(AbortedError):
            dist.barrier()
            return


def _failures() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    texts = []
    tensor = torch.ones(3)
    disagreeing: tuple[Callable[[], object], ...] = (
        lambda: dist.broadcast(tensor, 0) if rank == 0 else dist.all_reduce(tensor),
        lambda: dist.all_reduce(torch.ones(3 + (rank == 0))),
        lambda: dist.all_reduce(tensor, op=OPS.MAX if rank == 0 else OPS.MIN),
        lambda: dist.all_gather([torch.zeros(1 + rank)] * size, torch.zeros(1 + rank)),
    )
    for wrong in disagreeing:
        with pytest.raises(MismatchError) as caught:
            wrong()
        texts.append(str(caught.value))
        good = torch.ones(2)
        dist.all_reduce(good)
        assert good[0] == size
    if rank == 0:  # the other ranks skip this call
        with pytest.raises(AbortedError, match="timeout of the process group") as late:
            dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=0.2))
        texts.append(str(late.value))
        with pytest.raises(
            AbortedError, match=r"monitored_barrier #.* timeout of the process group"
        ) as missing:
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        assert missing.value.pending.missing == tuple(range(1, size))
    dist.monitored_barrier(_GROUPS["gloo"])
    _meet()
    dist.monitored_barrier()
    dist.all_reduce(tensor)
    unsupported: tuple[Callable[[], object], ...] = (
        lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.ones(2), op=OPS.BAND),
    )
    for refused in unsupported:
        with pytest.raises(UnsupportedError):
            refused()
    if rank == 0:
        with pytest.raises(
            AbortedError, match=r"recv from any rank #.* timeout of the process group"
        ) as late:
            dist.irecv(torch.ones(2), tag=9).wait(timedelta(seconds=0.1))  # type: ignore[union-attr]  # the rank is in the group
        assert late.value.pending.missing == tuple(range(1, size))
    dist.monitored_barrier(_GROUPS["gloo"])  # the others wait here, which hvdlab does not know
    with pytest.raises(
        AbortedError,
        match=r"all wait for each other: ranks 0.* in recv from any rank `c10d\.0\.9` \(test_c10d",
    ):
        dist.recv(torch.ones(2), tag=9)
    with pytest.raises(InvalidRequestError, match="times the elements"):  # Gloo would end the process
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(3 * size))
    with pytest.raises(InvalidRequestError, match="rows"):
        dist.all_to_all_single(torch.zeros(5 - size), torch.zeros(5 - size))
    dist.all_reduce(tensor)
    return texts


def test_failures_name_operation_number_and_lines_and_the_group_goes_on(world: Ranks) -> None:
    first = world.run(_failures, timeout=60)[0]
    assert all("test_c10d.py:" in text and " of group default_pg" in text for text in first), first
    assert all("#" in text for text in first)
    assert "broadcast float32[3] from rank 0" in first[0]
    assert "rank 0 waited" in first[4]

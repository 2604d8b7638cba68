"""Calls in which ``torch.distributed`` on hvdlab is to behave as on Gloo, in agreed and in watched groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)
from hvdlab.collectives.errors import AbortedError, InvalidRequestError, UnsupportedError
from support.ranks.resident import Ranks

Group = Any

_GROUPS: dict[str, Group] = {}


def _begin() -> None:
    """Make hvdlab's default group, and beside it a group of Gloo's."""
    dist.init_process_group("hvdlab")
    _GROUPS["gloo"] = dist.new_group(backend="gloo")


@pytest.fixture(scope="module", params=["agreed", "watched:gloo"])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    env = {"HVDLAB_C10D_WATCH": request.param}
    with Ranks(3, init=False, imports=["hvdlab.torch"], env=env) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def _plain(value: Any) -> Any:
    """Return tensors in nested lists as lists of numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _both(case: str) -> tuple[Any, Any]:
    """Return the results of a case with Gloo and with hvdlab."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, ours = (
        _plain(CASES[case](group, rank, size)) for group in (_GROUPS["gloo"], dist.group.WORLD)
    )
    return reference, ours


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


# -- outputs that are parts of inputs ---------------------------------------------------------------------------------


def _reduced_into_own_row(group: Group, rank: int, size: int) -> torch.Tensor:
    whole = values(rank, 4 * size)
    row = whole[4 * rank : 4 * rank + 4]
    dist.reduce_scatter_tensor(row, whole, group=group)
    return row


# -- the values of futures --------------------------------------------------------------------------------------------


def _gathered_value(group: Group, rank: int, size: int) -> list[Any]:
    given, outputs = values(rank, 2), [torch.zeros(2) for _ in range(size)]
    works = [
        dist.all_gather(outputs, given, group, async_op=True),
        dist.gather(given, outputs if rank == 0 else None, 0, group, async_op=True),
    ]
    found = [value for work in works for value in (work.get_future().wait(), work.wait())]
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    several = dist.all_gather_coalesced(lists, [given, values(rank, 3)], group, async_op=True)
    return [*found, several.wait()]


# -- arguments --------------------------------------------------------------------------------------------------------


def _limits_in_seconds(group: Group, rank: int, size: int) -> list[Any]:
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    dist.monitored_barrier(group, timeout=30.0)
    return [work.wait(30.0)]


def _received_in_another_shape(group: Group, rank: int, size: int) -> torch.Tensor:
    into = torch.zeros(6)
    if rank == 0:
        dist.send(values(0, 2, 3), 1, group)
    elif rank == 1:
        dist.recv(into, 0, group)
    return into


def _called_directly(group: Group, rank: int, size: int) -> list[Any]:
    """Call the group's methods in the forms that torch's overloads have for users."""
    limit, given = timedelta(seconds=60), [values(rank + i, 2) for i in range(11)]
    parts = [[torch.zeros(2) for _ in range(size)] for _ in range(4)]
    rows = [torch.zeros(2 * size), torch.zeros(2 * size), torch.zeros(size), torch.zeros(2)]
    at_root = [] if rank else parts[2]
    works = [
        group.allreduce(given[0], op=dist.ReduceOp.MAX),
        group.allreduce([given[1]], dist.ReduceOp.MIN, limit),
        group.allreduce(tensors=[given[2]]),
        group.broadcast(given[3], root=1),
        group.broadcast(tensor=given[4], root=2, timeout=limit),
        group.reduce(given[5], 0, dist.ReduceOp.MAX),
        group.allgather(parts[0], given[6]),
        group.allgather(output_tensors=[parts[1]], input_tensors=[given[6]]),
        group.gather(at_root, given[7], root=0),
        group.scatter(given[8], [] if rank else [values(i, 2) for i in range(size)], root=0, timeout=limit),
        group.reduce_scatter(rows[3], [values(rank + i, 2) for i in range(size)], op=dist.ReduceOp.MAX),
        group._allgather_base(output=rows[0], input=given[9]),
        group.alltoall(output_tensors=parts[3], input_tensors=[values(rank + i, 2) for i in range(size)]),
        group.alltoall_base(rows[2], values(rank, size), [], [], timeout=limit),
        group.barrier(timeout=limit),
    ]
    for work in works:
        work.wait()
    reduced = [given.pop(5)]
    return [given, parts, rows, [] if rank else reduced]


CASES: dict[str, Callable[[Group, int, int], Any]] = {
    "reduce_scatter in place": _reduced_into_own_row,
    "values": _gathered_value,
    "seconds": _limits_in_seconds,
    "shape": _received_in_another_shape,
    "directly": _called_directly,
}


def test_reduce_scatter_into_its_own_input_is_as_with_gloo(world: Ranks) -> None:
    for reference, ours in world.run(_both, "reduce_scatter in place", timeout=60):
        assert ours == reference


def test_values_of_gathers_are_flat_lists_as_with_gloo(world: Ranks) -> None:
    for reference, ours in world.run(_both, "values", timeout=60):
        assert ours == reference


def test_limits_may_be_numbers_of_seconds_as_with_gloo(world: Ranks) -> None:
    for reference, ours in world.run(_both, "seconds", timeout=60):
        assert ours == reference


def test_message_arrives_in_a_tensor_of_another_shape(world: Ranks) -> None:
    for reference, ours in world.run(_both, "shape", timeout=60):
        assert ours == reference


def test_methods_of_a_group_take_tensors_and_keywords(world: Ranks) -> None:
    for reference, ours in world.run(_both, "directly", timeout=60):
        assert ours == reference


# -- tensors that are no contiguous memory ----------------------------------------------------------------------------

Layout = Callable[[torch.Tensor], torch.Tensor]


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with a tensor's values in every second column of a wider one."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view with a tensor's values whose memory has the negated ones."""
    return torch._neg_view(-tensor)


LAYOUTS: dict[str, Layout] = {"strided": _every_second, "negated": _negated}


def _in_layout(group: Group, rank: int, size: int, layout: Layout) -> list[torch.Tensor]:
    """Return all outputs of all operations with tensors of this layout."""
    root = size - 1

    def zeros(*shape: int) -> torch.Tensor:
        return layout(torch.zeros(shape))

    def given(*shape: int) -> torch.Tensor:
        return layout(values(rank, *shape))

    def parts() -> list[torch.Tensor]:
        return [zeros(2) for _ in range(size)]

    summed, sent, at_root, later = given(2, 3), given(2, 3), given(4), given(5)
    into, row, piece, exchanged, part, heard = (
        zeros(size * 2),
        zeros(2),
        zeros(2),
        zeros(size, 2),
        zeros(2),
        zeros(3),
    )
    listed, gathered, received = parts(), parts(), parts()
    dist.all_reduce(summed, group=group)
    dist.broadcast(sent, root, group)
    dist.reduce(at_root, root, group=group)
    dist.all_gather(listed, given(2), group)
    dist.all_gather_into_tensor(into, given(2), group)
    dist.reduce_scatter_tensor(row, given(size * 2), group=group)
    dist.reduce_scatter(piece, [given(2) for _ in range(size)], group=group)
    dist.all_to_all_single(exchanged, given(size, 2), group=group)
    dist.all_to_all(received, [given(2) for _ in range(size)], group)
    dist.gather(given(2), gathered if rank == root else None, root, group)
    dist.scatter(part, [given(2) for _ in range(size)] if rank == root else None, root, group)
    if rank == 0:
        dist.send(given(3), 1, group)
    elif rank == 1:
        dist.recv(heard, 0, group)
    work = dist.all_reduce(later, group=group, async_op=True)
    # Read in the callback: the outputs have their values before the future has its own.
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    work.wait()
    reduced = [at_root] if rank == root else []  # undefined elsewhere
    single = [summed, sent, into, row, piece, exchanged, part, heard, later, doubled]
    return [*single, *reduced, *listed, *received, *gathered]


def _beside_contiguous(layout: str) -> tuple[Any, Any]:
    """Return the outputs of Gloo with contiguous tensors, and hvdlab's with those of a layout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = _in_layout(_GROUPS["gloo"], rank, size, lambda tensor: tensor)
    return _plain(reference), _plain(_in_layout(dist.group.WORLD, rank, size, LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_in_any_layout_get_the_values_of_contiguous_ones(world: Ranks, layout: str) -> None:
    for reference, ours in world.run(_beside_contiguous, layout, timeout=60):
        assert ours == reference


def _between_the_elements() -> list[float]:
    """Return the memory around a strided output, in inference mode."""
    with torch.inference_mode():
        whole = torch.arange(6.0)
        dist.all_reduce(whole[::2])
    return whole.tolist()


def test_elements_between_those_of_an_output_stay(world: Ranks) -> None:
    assert world.run(_between_the_elements, timeout=60) == [[0, 1, 6, 3, 12, 5]] * world.size


def _refuses_shared_elements() -> None:
    """Call with an output whose elements are one on one rank. Nothing is sent, so the group goes on."""
    group = dist.group.WORLD
    if dist.get_rank() == 0 and type(group).__name__ == "WatchedGroup":
        with pytest.raises(InvalidRequestError, match="has elements that share memory"):
            dist.all_reduce(torch.zeros(1).expand(3))
    sent = torch.ones(1).expand(3) if dist.get_rank() == 0 else torch.zeros(3)
    dist.broadcast(sent, 0)
    assert sent.tolist() == [1] * 3


def test_output_whose_elements_share_memory_is_refused(world: Ranks) -> None:
    world.run(_refuses_shared_elements, timeout=60)


# -- wrong calls of one rank ------------------------------------------------------------------------------------------


def _only_the_root_is_wrong() -> None:
    """Call what the root can find wrong by itself on the root alone. Nothing is sent, so the group goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        wide = [torch.zeros(2) for _ in range(size)]
        with pytest.raises((InvalidRequestError, RuntimeError), match="invalid tensor size at index"):
            dist.gather(torch.zeros(1), wide, 0)
        with pytest.raises((InvalidRequestError, RuntimeError), match="invalid tensor size at index"):
            dist.scatter(torch.zeros(1), wide, 0)
    dist.barrier()


def test_gather_and_scatter_with_wrong_sizes_fail_on_the_root_alone(world: Ranks) -> None:
    world.run(_only_the_root_is_wrong, timeout=60)


def _negative_tag() -> None:
    """Call messages with a negative tag on one rank. Nothing is sent, so the group goes on."""
    if dist.get_rank() == 0:
        for call in (dist.send, dist.recv):
            with pytest.raises(InvalidRequestError, match="Tag must be nonnegative"):
                call(torch.zeros(1), 1, tag=-1)
        with pytest.raises(InvalidRequestError, match="only supports dense tensors"):
            dist.send(torch.eye(2).to_sparse(), 1)
    dist.barrier()


def test_wrong_message_is_refused_on_its_rank_alone(world: Ranks) -> None:
    world.run(_negative_tag, timeout=60)


def _wrong_splits() -> None:
    """Call with splits that don't fit the tensors on one rank. Nothing is sent, so the group goes on."""
    size = dist.get_world_size()
    fitting, short, few = [1] * size, [1] * (size - 1) + [0], [size]
    if dist.get_rank() == 0:
        output, given = torch.zeros(size), torch.ones(size)
        for wrong in ((short, fitting), (fitting, short), (few, fitting), (fitting, few)):
            with pytest.raises(InvalidRequestError, match=r"all_to_all_single: .* (output|input) splits"):
                dist.all_to_all_single(output, given, *wrong)
        with pytest.raises(InvalidRequestError, match="does not divide equally"):
            dist.all_to_all_single(output, torch.ones(size + 1))
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, torch.ones(size), fitting, fitting)
    assert exchanged.tolist() == fitting


def test_wrong_splits_are_refused_on_their_rank_alone(world: Ranks) -> None:
    world.run(_wrong_splits, timeout=60)


def _wrong_numbers_of_tensors() -> None:
    """Call with lists that are too long or too short on one rank. Nothing is sent, so the group goes on."""
    size = dist.get_world_size()

    def tensors(count: int) -> list[torch.Tensor]:
        return [torch.ones(1) for _ in range(count)]

    if dist.get_rank() == 0:
        for outputs, inputs, which in (
            (size + 1, size, "output"),
            (size - 1, size, "output"),
            (size, size + 1, "input"),
            (size, size - 1, "input"),
        ):
            with pytest.raises(ValueError, match=f"all_to_all: Number of {which} tensors not equal"):
                dist.all_to_all(tensors(outputs), tensors(inputs))
    exchanged = [torch.zeros(1) for _ in range(size)]
    dist.all_to_all(exchanged, tensors(size))
    assert exchanged == tensors(size)


def test_wrong_number_of_tensors_is_refused_on_its_rank_alone(world: Ranks) -> None:
    world.run(_wrong_numbers_of_tensors, timeout=60)


def _split() -> None:
    for name in ("split_group", "splitGroup"):
        with pytest.raises(UnsupportedError, match=r"dist\.new_group\(\[0, 1\]\)"):
            getattr(dist.group.WORLD, name)([0, 1], group_name="half")
    dist.barrier()


def test_split_of_a_group_is_refused_and_the_rank_lives(world: Ranks) -> None:
    world.run(_split, timeout=60)


def _asked_as_a_backend() -> None:
    """Ask the group for its backend, as torch does for each group if a device is bound to the default one."""
    default: Any = dist.group.WORLD
    backend = default._get_backend(torch.device("cpu"))
    assert not backend.supports_splitting
    assert backend.options._timeout == dist.distributed_c10d.default_pg_timeout
    assert backend.options.global_ranks_in_group == list(range(dist.get_world_size()))
    default.bound_device_id = torch.device("cuda", 0)
    try:
        half = dist.new_group([0, 1])
    finally:
        default.bound_device_id = None
    if dist.get_rank() < 2:
        dist.barrier(half)


def test_group_made_with_a_bound_device_is_not_split(world: Ranks) -> None:
    world.run(_asked_as_a_backend, timeout=60)


def _limited() -> str:
    """Give up a call that the other ranks leave out, by the timeout that the group has got after it was made."""
    group = dist.new_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), group)
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(AbortedError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        text = str(caught.value)
    dist.monitored_barrier(_GROUPS["gloo"])
    return text


def test_timeout_that_is_set_later_limits_calls_of_the_group(world: Ranks) -> None:
    assert "after 0.2 s, the timeout of the process group" in world.run(_limited, timeout=60)[0]


def _limited_by_the_call() -> str:
    """Give up a call that the other ranks leave out, by the limit that it has itself."""
    group, text = dist.new_group(), ""
    if dist.get_rank() == 0:
        with pytest.raises(AbortedError) as caught:
            group.allreduce(torch.ones(1), timeout=timedelta(seconds=0.2)).wait()
        text = str(caught.value)
    dist.monitored_barrier(_GROUPS["gloo"])
    return text


def test_limit_of_a_call_ends_its_wait(world: Ranks) -> None:
    assert "after 0.2 s, the timeout of the process group" in world.run(_limited_by_the_call, timeout=60)[0]


def _wrong_arguments() -> None:
    group: Any = dist.group.WORLD
    tensor = torch.ones(1)
    calls: tuple[Callable[[], object], ...] = (
        lambda: group.allreduce(),
        lambda: group.allreduce(tensor, root=0),
        lambda: group.allreduce(tensor, 5),
        lambda: group.broadcast(tensor, 0, None, 3),
        lambda: group.barrier(dist.BarrierOptions(), timeout=timedelta(seconds=60)),
    )
    for call in calls:
        with pytest.raises(TypeError):
            call()
    dist.barrier()


def test_arguments_that_a_method_lacks_are_refused(world: Ranks) -> None:
    world.run(_wrong_arguments, timeout=60)

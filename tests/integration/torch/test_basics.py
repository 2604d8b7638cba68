"""Initialization, ranks, queries, process sets, and that the public names and signatures are Horovod's."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from support.engine_probe import EngineProbe
from support.ranks.resident import Ranks

SIGNATURES = {
    "allgather": "tensor, name, process_set",
    "allgather_async": "tensor, name, process_set",
    "allgather_object": "obj, name",
    "allreduce": "tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set",
    "allreduce_": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "allreduce_async": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "allreduce_async_": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "alltoall": "tensor, splits, name, process_set",
    "alltoall_async": "tensor, splits, name, process_set",
    "add_process_set": "process_set",
    "barrier": "process_set",
    "broadcast": "tensor, root_rank, name, process_set",
    "broadcast_": "tensor, root_rank, name, process_set",
    "broadcast_async": "tensor, root_rank, name, process_set",
    "broadcast_async_": "tensor, root_rank, name, process_set",
    "broadcast_object": "obj, root_rank, name, process_set",
    "broadcast_optimizer_state": "optimizer, root_rank, model",
    "broadcast_parameters": "params, root_rank",
    "DistributedOptimizer": "optimizer, named_parameters, compression, backward_passes_per_step, op, "
    "gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set",
    "grouped_allgather": "tensors, name, process_set",
    "grouped_allgather_async": "tensors, name, process_set",
    "grouped_allreduce": "tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce_": "tensors, average, name, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce_async": "tensors, average, name, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce_async_": "tensors, average, name, op, prescale_factor, postscale_factor, process_set",
    "grouped_reducescatter": "tensors, name, compression, op, process_set, prescale_factor, postscale_factor",
    "grouped_reducescatter_async": "tensors, name, op, process_set, prescale_factor, postscale_factor",
    "poll": "handle",
    "reducescatter": "tensor, name, compression, op, process_set, prescale_factor, postscale_factor",
    "reducescatter_async": "tensor, name, op, process_set, prescale_factor, postscale_factor",
    "remove_process_set": "process_set",
    "sparse_allreduce_async": "tensor, name, op, process_set",
    "start_timeline": "file_path, mark_cycles",
    "synchronize": "handle",
}
DEFAULTS = {
    "average": None,
    "name": None,
    "compression": hvd.Compression.none,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": hvd.global_process_set,
    "splits": None,
    "model": None,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovod_s(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters
    given = [p for p in parameters if (name, p) != ("allgather_object", "process_set")]  # hvdlab has one more
    assert ", ".join(given) == SIGNATURES[name]
    for parameter in parameters.values():
        if parameter.name in DEFAULTS and parameter.default is not inspect.Parameter.empty:
            assert (
                parameter.default is DEFAULTS[parameter.name] or parameter.default == DEFAULTS[parameter.name]
            )


def test_operators_have_horovod_s_numbers() -> None:
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_every_public_name_exists_and_is_documented() -> None:
    for name in hvd.__all__:
        value = getattr(hvd, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, name


def test_init_shutdown_and_init_again(world_of_one: None) -> None:
    for _ in range(2):
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
    hvd.init()  # has no effect


def test_init_takes_the_ranks_there_are(world_of_one: None) -> None:
    hvd.shutdown()
    for comm in (None, [], [0], (0,)):
        hvd.init(comm=comm)
        assert hvd.size() == 1
    with pytest.raises(UnsupportedError, match=r"names the ranks \[0, 1\], but \[0\] were started"):
        hvd.init(comm=[0, 1])
    assert hvd.is_initialized()
    hvd.shutdown()
    with pytest.raises(UnsupportedError):
        hvd.init(comm=[0, 1])
    assert not hvd.is_initialized()
    no_sets: tuple[Any, ...] = ("static", [["a"]], 3, [[0, 5]], [[]])
    for wrong in no_sets:
        with pytest.raises((InvalidRequestError, TypeError)):
            hvd.init(process_sets=wrong)
        assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"two process sets of the ranks \[0\]"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), [0]])
    hvd.init(process_sets="dynamic")


def test_before_init_queries_raise_value_error() -> None:
    whole = hvd.global_process_set
    assert whole.process_set_id == 0
    queries = (
        hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_homogeneous,
        hvd.mpi_enabled, hvd.gloo_enabled, hvd.mpi_threads_supported, whole.size, whole.rank, whole.included,
        hvd.barrier, lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.add_process_set([0]),
    )  # fmt: skip
    for query in queries:
        with pytest.raises(ValueError, match=r"hvd\.init"):
            query()
    assert repr(whole) == "ProcessSet(process_set_id=0, ranks=all)"
    assert whole.ranks == []
    assert not hvd.is_initialized()


def _place() -> tuple[Any, ...]:
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def test_places_of_ranks_on_one_host(ranks: Ranks) -> None:
    size = ranks.size
    assert ranks.run(_place) == [(rank, size, rank, size, 0, 1) for rank in range(size)]


def _queries() -> tuple[bool, ...]:
    return (
        hvd.mpi_built(),
        hvd.mpi_enabled(),
        hvd.mpi_threads_supported(),
        hvd.gloo_built(),
        hvd.nccl_built(),
        hvd.cuda_built(),
        hvd.rocm_built(),
        hvd.ddl_built(),
        hvd.ccl_built(),
    )


def test_queries_tell_what_there_is(two_ranks: Ranks) -> None:
    # No MPI launcher started these ranks; gloo comes with torch.
    assert two_ranks.run(_queries) == [(False, False, False, True, False, False, False, False, False)] * 2


# -- process sets -----------------------------------------------------------------------------------------------------


def _global_set() -> tuple[Any, ...]:
    whole = hvd.global_process_set
    return whole.process_set_id, whole.ranks, whole.size(), whole.rank(), whole.included()


def test_the_global_process_set(ranks: Ranks) -> None:
    everyone = list(range(ranks.size))
    assert ranks.run(_global_set) == [(0, everyone, ranks.size, rank, True) for rank in everyone]


def _some_ranks() -> dict[str, Any]:
    outer = hvd.add_process_set([0, 3])
    inner = hvd.ProcessSet([2, 1])
    before = (inner.size(), inner.rank(), inner.included())
    assert hvd.add_process_set(inner) is inner
    mine = outer if outer.included() else inner
    rank = hvd.rank()
    leaf = torch.ones(2, requires_grad=True)
    gathered = hvd.allgather(leaf * rank, process_set=mine)
    (gathered * (rank + 1)).sum().backward()
    outcome = {
        "before": before,
        "place": (mine.ranks, mine.size(), mine.rank()),
        "sum": hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=mine).item(),
        "broadcast": hvd.broadcast(torch.tensor(rank), 3 if mine is outer else 2, process_set=mine).item(),
        "gathered": gathered.tolist(),
        "gradient": leaf.grad.tolist() if leaf.grad is not None else None,
        "objects": hvd.allgather_object(rank, process_set=mine),
        "everyone": hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item(),
    }
    hvd.barrier(process_set=mine)
    with pytest.raises(InvalidRequestError):
        hvd.allreduce(torch.ones(1), process_set=inner if mine is outer else outer)
    assert hvd.remove_process_set(outer)
    assert hvd.remove_process_set(inner)
    assert not hvd.remove_process_set(inner)
    with pytest.raises(InvalidRequestError, match="add_process_set"):
        hvd.allreduce(torch.ones(1), process_set=mine)
    return outcome


def test_process_sets(four_ranks: Ranks) -> None:
    for rank, outcome in enumerate(four_ranks.run(_some_ranks)):
        members = [0, 3] if rank in (0, 3) else [1, 2]
        mean = sum(member + 1 for member in members) / 2
        assert outcome == {
            "before": (None, None, None),
            "place": (members, 2, members.index(rank)),
            "sum": 3,
            "broadcast": members[1],
            "gathered": [float(members[0])] * 2 + [float(members[1])] * 2,
            "gradient": [mean * rank] * 2,
            "objects": members,
            "everyone": 6,
        }


def _twice() -> None:
    first = hvd.add_process_set(range(0, hvd.size(), 2))
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(first)
    with pytest.raises(ValueError, match="process set"):
        hvd.add_process_set(first.ranks or [0, 2])
    with pytest.raises(ValueError, match="global_process_set"):
        hvd.add_process_set(hvd.ProcessSet(range(hvd.size())))
    stale = copy.copy(first)
    assert stale.process_set_id == first.process_set_id
    assert copy.copy(hvd.global_process_set) is hvd.global_process_set
    assert hvd.remove_process_set(first)
    assert stale.process_set_id is None
    assert (first.process_set_id, first.size(), first.rank(), first.included()) == (None, None, None, None)
    assert hvd.add_process_set(first) is first
    assert hvd.remove_process_set(first)


def test_a_set_of_the_same_ranks_is_refused(four_ranks: Ranks) -> None:
    four_ranks.run(_twice)


def test_a_set_of_another_world_is_not_registered(world_of_one: None) -> None:
    old = hvd.ProcessSet([0])
    hvd.shutdown()
    assert old.process_set_id is None
    hvd.init(process_sets=[old])
    assert old.process_set_id == 1
    hvd.shutdown()
    assert old.process_set_id is None
    other = hvd.ProcessSet([0])
    hvd.init(process_sets=[other])
    assert (old.process_set_id, other.process_set_id) == (None, 1)


@pytest.mark.parametrize("ranks_of_it", ["0", [0, 0], [-1], [0.5], 3])
def test_ranks_of_a_process_set_are_checked(ranks_of_it: Any) -> None:
    with pytest.raises(InvalidRequestError, match="ranks"):
        hvd.ProcessSet(ranks_of_it)


def test_global_set_whose_removal_is_attempted_stays(world_of_one: None) -> None:
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def test_process_sets_given_to_init(monkeypatch: pytest.MonkeyPatch, world_of_one: None) -> None:
    hvd.shutdown()
    alone = hvd.ProcessSet([0])
    hvd.init(process_sets=[alone])
    assert alone.included()
    assert hvd.allreduce(torch.ones(1), process_set=alone).item() == 1.0
    assert hvd.remove_process_set(alone)


# -- timeline ---------------------------------------------------------------------------------------------------------


def _timeline(path: str) -> None:
    if hvd.rank() == 0:
        hvd.start_timeline(path, mark_cycles=True)
    hvd.barrier()
    for _ in range(3):
        hvd.allreduce(torch.ones(10), name="seen")
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.stop_timeline()


def test_timeline(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    two_ranks.run(_timeline, str(path))
    assert "seen" in path.read_text()
    assert json.loads(path.read_text())


def _through() -> tuple[bool, bool]:
    return hvd.mpi_enabled(), hvd.gloo_enabled()


def test_what_collectives_go_through(two_ranks: Ranks) -> None:
    assert two_ranks.run(_through) == [(False, False)] * 2
    with Ranks(2, env={"HVDLAB_PLANE": "gloo"}, imports=["hvdlab.torch"]) as world:
        assert world.run(_through) == [(False, True)] * 2


@pytest.mark.parametrize(
    ("options", "answers"),
    [({}, (False, True)), ({"outer": "mpi"}, (True, False)), ({"inner": "mpi"}, (True, True))],
)
def test_what_collectives_go_through_on_several_hosts(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], answers: tuple[bool, bool]
) -> None:
    world = EngineProbe(context.engine()).locked.state.sets[0]
    with monkeypatch.context() as patch:
        patch.setattr(world, "plane", "hierarchical")
        patch.setattr(world, "options", options)
        assert _through() == answers

"""How hvdlab finds the bucket of DDP that an operation reduces, and the names of the bucket's parameters in errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)
from hvdlab.collectives import context
from hvdlab.collectives.context import own_error
from hvdlab.collectives.errors import CollectiveError, MismatchError
from hvdlab.torch.c10d.ddp_buckets import NESTED, Bucket, Layout, bucket_text
from support.ranks.resident import Ranks

Wrap = Callable[[], nn.parallel.DistributedDataParallel]
SIZE = 2
KIB = 1 / 1024
"""The size of a bucket of 1 KiB, in MiB, which is DDP's unit."""


# -- how far a pass has come ------------------------------------------------------------------------------------------


def _tensors(*counts: int) -> list[torch.Tensor]:
    return [torch.zeros(count) for count in counts]


def _pass(layout: Layout, tensors: list[torch.Tensor], run: int) -> list[int | None]:
    found = []
    for tensor in tensors:
        index = layout.find(tensor, run)
        if index is not None:
            layout.reduced(index, tensor, run)
        found.append(index)
    return found


def _layout(*counts: int, certain: bool = True) -> Layout:
    return Layout([Bucket(str(i), count, torch.float32) for i, count in enumerate(counts)], certain)


def test_buckets_are_found_by_their_order_and_then_by_their_memory() -> None:
    layout, tensors = _layout(4, 4, 8, 4), _tensors(4, 4, 8, 4)
    assert _pass(layout, tensors, 7) == [0, 1, 2, 3]
    assert _pass(layout, tensors[1:3], 8) == [
        1,
        2,
    ]  # found by their memory, though the pass does not begin with bucket 0
    assert _pass(layout, tensors, 9) == [0, 1, 2, 3]
    assert layout.find(torch.zeros(5), 9) is None


def test_a_pass_that_has_failed_does_not_count_for_the_next() -> None:
    layout, tensors = _layout(4, 4, 4), _tensors(4, 4, 4)
    assert _pass(layout, tensors[:1], 1) == [0]
    assert _pass(layout, _tensors(4, 4, 4), 2) == [0, 1, 2]


def test_runs_within_a_run_are_of_its_pass() -> None:
    layout, tensors = _layout(4, 4, 4, 4), _tensors(4, 4, 4, 4)
    assert _pass(layout, tensors[:1], NESTED) == [0]
    assert _pass(layout, tensors[1:2], NESTED) == [1]
    assert _pass(layout, tensors[2:3], 5) == [2]
    assert _pass(layout, tensors[3:], NESTED) == [3]


def test_where_buckets_may_be_left_out_only_sizes_tell() -> None:
    layout = _layout(4, 8, 4, certain=False)
    assert _pass(layout, _tensors(4, 8, 4), 1) == [None, 1, 2]


def test_long_buckets_are_told_in_short() -> None:
    assert bucket_text(2, ["a"]) == "DDP bucket 2: a"
    assert bucket_text(0, ["a", "b", "c"]) == "DDP bucket 0: a, b and 1 more"


# -- real models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(SIZE, init=False, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def _begin() -> None:
    dist.init_process_group("hvdlab")


def _layers() -> nn.Sequential:
    """Return layers of equal sizes, so that sizes alone do not distinguish buckets."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))


class _Checkpointed(nn.Module):
    """Each layer's backward pass is a run of the autograd engine within the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(10, 16, sparse=True), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.words(x.long().abs().clamp(max=9)))
        return found


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


def _hooked(hook: Any) -> Wrap:
    def wrap() -> nn.parallel.DistributedDataParallel:
        model = nn.parallel.DistributedDataParallel(_layers(), bucket_cap_mb=KIB)
        if isinstance(hook, str):
            model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))  # type: ignore[attr-defined]
        else:
            model.register_comm_hook(None, hook)
        return model

    return wrap


def _with(make: Callable[[], nn.Module] = _layers, **options: Any) -> Wrap:
    return lambda: nn.parallel.DistributedDataParallel(make(), bucket_cap_mb=KIB, **options)


WRAPPERS: dict[str, Wrap] = {
    "as it is": _with(),
    "views": _with(gradient_as_bucket_view=True),
    "unused": _with(find_unused_parameters=True),
    "static": _with(static_graph=True),
    "not synchronized": _with(init_sync=False),
    "checkpoints": _with(_Checkpointed, static_graph=True),
    "sparse": _with(_Embedded),
    "complex": _with(_Complex),
    "torch's hook": _hooked("ALLREDUCE"),
    "hook": _hooked(default_hooks.allreduce_hook),
    "hook of float16": _hooked(default_hooks.fp16_compress_hook),
}


def _buckets(model: Any) -> list[str]:
    """Return the buckets as torch itself reports them, outside of a pass; torch fails to do so if gradients are
    sparse."""
    if isinstance(model.module, _Embedded):
        first = "out.bias, out.weight" if model._has_rebuilt_buckets else "out.weight, out.bias"
        return [f"DDP bucket 0: {first}", "DDP bucket 1: words.weight"]
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return [
        bucket_text(bucket.index(), [names[id(each)] for each in bucket.parameters()])
        for bucket in model.reducer._get_zeros_like_grad_buckets()
    ]


@contextlib.contextmanager
def _seen() -> Iterator[list[str]]:
    """Yield the parts of models that the default group's all_reduces are for, in order."""
    calls: Any = dist.group.WORLD._calls  # type: ignore[union-attr]
    seen: list[str] = []
    recorded_as = calls.recorded_as

    def watch(operation: str, part: Any) -> str:
        if operation == "all_reduce" and part.name:
            seen.append(part.name)
        label: str = recorded_as(operation, part)
        return label

    calls.recorded_as = watch
    try:
        yield seen
    finally:
        del calls.recorded_as


def _names(name: str) -> list[tuple[str, list[str], list[str]]]:
    """The passes whose buckets hvdlab names otherwise than torch: the pass, hvdlab's names, and torch's."""
    model, wrong = WRAPPERS[name](), []
    rank = dist.get_rank()
    for number in range(4):
        x = torch.full((2, 16), float(rank), requires_grad=True)
        with _seen() as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as those on checkpoints of integers
            output = model(x)
            expected = _buckets(model)  # after the forward pass, which can have remade them
            output.square().mean().backward()
        if name == "not synchronized" and number == 0:
            expected = []
        if seen != expected:
            wrong.append((f"{name}, pass {number}", list(seen), expected))
    return wrong


def _all_names() -> list[tuple[str, list[str], list[str]]]:
    return [each for name in WRAPPERS for each in _names(name)]


def test_buckets_are_named_as_torch_knows_them(world: Ranks) -> None:
    assert world.run(_all_names, timeout=120) == [[]] * SIZE


def _two_in_one() -> list[list[str]]:
    """Two models whose gradients one backward pass computes."""
    first, second = WRAPPERS["views"](), WRAPPERS["sparse"]()
    found = []
    for _ in range(3):
        with _seen() as seen:
            outputs = [model(torch.ones(2, 16)).square().mean() for model in (first, second)]
            expected = _buckets(first) + _buckets(second)
            sum(outputs).backward()
        found += [sorted(seen), sorted(expected)]
    return found


def _made_anew() -> list[list[str]]:
    """Return the buckets of a model whose reducer ``agree`` has replaced, as after a pass that has failed."""
    from hvdlab.torch.c10d import agree

    model, found = WRAPPERS["as it is"](), []
    for _ in range(2):
        for _ in range(2):
            with _seen() as seen:
                output = model(torch.ones(2, 16))
                expected = _buckets(model)
                output.square().mean().backward()
            found += [list(seen), expected]
        agree(model)
    return found


def test_several_models_and_one_whose_reducer_is_made_anew(world: Ranks) -> None:
    for case in (_two_in_one, _made_anew):
        for found in world.run(case, timeout=60):
            assert found[0::2] == found[1::2]
            assert all(found)


def _fails() -> str:
    """Rank 1 broadcasts while rank 0 reduces its only bucket, so that nothing more is in flight afterwards."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16)))
    for _ in range(2):
        model(torch.ones(2, 16)).square().mean().backward()
    try:
        if dist.get_rank() == 1:
            dist.broadcast(torch.zeros(3), 0)
        else:
            model(torch.ones(2, 16)).square().mean().backward()
    except CollectiveError as error:
        return str(error)
    return ""


def test_errors_name_the_bucket_on_all_ranks(world: Ranks) -> None:
    first, second = world.run(_fails, timeout=60)
    # It has come through DDP's C++, as itself: with its type, and without words of torch's around its text.
    assert first.startswith("`all_reduce #")
    assert ", DDP bucket 0: 0.bias, 0.weight`: the ranks disagree" in first
    assert first.endswith("the group is intact and can go on.")
    for text in (first, second):
        assert "test_c10d_ddp_buckets.py:" in text
        assert ", DDP bucket 0: 0.bias, 0.weight): allreduce float32[272]" in text


def _waits_for_a_future() -> tuple[bool, bool]:
    """Return whether an error that a future of torch's has raised is known as hvdlab's, and whether the kept copy holds
    no frames."""
    if dist.get_rank() == 1:
        with pytest.raises(MismatchError):
            dist.broadcast(torch.zeros(3), 0)
        return True, True
    work: Any = dist.all_reduce(torch.zeros(2), async_op=True)
    with pytest.raises(RuntimeError, match="MismatchError: `all_reduce #") as caught:
        work.get_future().wait()
    kept = context.engine().sent_through_native[-1]
    frames = kept.__traceback__
    return own_error(caught.value) is kept, frames is None


def test_an_error_of_a_future_is_known_as_ours_and_keeps_nothing_alive(world: Ranks) -> None:
    assert world.run(_waits_for_a_future, timeout=60) == [(True, True)] * SIZE


def _skips_a_backward(rounds: int) -> str:
    """Rank 1 skips the backward pass of step 2, and so ends before rank 0 does."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for step in range(rounds):
            loss = model(torch.ones(2, 4)).square().mean()
            if dist.get_rank() == 0 or step != 2:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    except CollectiveError as error:
        return "; ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def test_a_backward_pass_that_a_rank_has_skipped_is_found_by_its_steps(world: Ranks) -> None:
    first, second = world.run(_skips_a_backward, 6, timeout=60)
    for text in (first, second):
        assert "the ranks disagree. rank 0 (" in text
        assert ", DDP bucket 0: bias, weight): allreduce float32[20]" in text
    assert "rank 1 has probably skipped a backward pass" in second

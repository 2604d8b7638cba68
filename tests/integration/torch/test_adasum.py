"""Adasum of tensors, and of optimizers' steps, on real ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlab.torch as hvd
from conformance.planes.adasum_cases import expected
from support.ranks.resident import Ranks

Tensors = list[torch.Tensor]


def tensors(rank: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 4), (), (2000,))]


def combined(parts: Tensors) -> torch.Tensor:
    flat = [part.detach().double().reshape(-1).numpy() for part in parts]
    return torch.from_numpy(expected(flat)).view(parts[0].shape)


FORMS: dict[str, Callable[[Tensors, dict[str, Any]], Tensors]] = {
    "allreduce": lambda ts, kw: [hvd.allreduce(t, **kw) for t in ts],
    "allreduce_": lambda ts, kw: [hvd.allreduce_(t, **kw) for t in ts],
    "async": lambda ts, kw: [hvd.synchronize(h) for h in [hvd.allreduce_async(t, **kw) for t in ts]],
    "async_": lambda ts, kw: [hvd.synchronize(h) for h in [hvd.allreduce_async_(t, **kw) for t in ts]],
    "grouped": lambda ts, kw: hvd.grouped_allreduce(ts, **kw),
    "grouped_": lambda ts, kw: hvd.grouped_allreduce_(ts, name="group", **kw),
    "grouped async": lambda ts, kw: hvd.synchronize(hvd.grouped_allreduce_async(ts, **kw)),
    "compressed": lambda ts, kw: [hvd.allreduce(t, compression=hvd.Compression.fp16, **kw) for t in ts],
}


def _reduce(form: str, dtype: torch.dtype, members: list[int] | None) -> Tensors:
    kw: dict[str, Any] = {"op": hvd.Adasum, "prescale_factor": 0.5, "postscale_factor": 4.0}
    chosen = None if members is None else hvd.add_process_set(members)
    outputs: Tensors = []
    if chosen is None or chosen.included():
        given = tensors(hvd.rank(), dtype)
        outputs = FORMS[form](given, kw if chosen is None else {**kw, "process_set": chosen})
        assert all(a is b for a, b in zip(outputs, given, strict=True)) == form.endswith("_")
    if chosen is not None:
        hvd.remove_process_set(chosen)
    return outputs


def check(outcomes: list[Tensors], members: list[int], tolerance: float, dtype: torch.dtype) -> None:
    parts = [tensors(rank, dtype) for rank in members]
    for number in range(len(parts[0])):
        reference = combined([part[number] for part in parts]) * 2.0
        for rank in members:
            ours = outcomes[rank][number]
            assert torch.equal(ours, outcomes[members[0]][number]), "ranks differ"
            assert ours.dtype is dtype
            torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_allreduce(ranks: Ranks, form: str) -> None:
    outcomes = ranks.run(_reduce, form, torch.float64, None)
    check(outcomes, list(range(ranks.size)), 5e-3 if form == "compressed" else 1e-9, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)]
)
def test_dtypes_in_a_process_set_of_three(four_ranks: Ranks, dtype: torch.dtype, tolerance: float) -> None:
    check(four_ranks.run(_reduce, "grouped", dtype, [0, 1, 3]), [0, 1, 3], tolerance, dtype)


# -- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, 0.05),
}
OPTIONS: dict[str, Callable[[nn.Sequential], dict[str, Any]]] = {
    "plain": lambda net: {},
    "named": lambda net: {"named_parameters": net.named_parameters()},
    "groups": lambda net: {"groups": 2},
    "own groups": lambda net: {"groups": [[*net[0].parameters()], [net[2].bias]]},
    "passes": lambda net: {"backward_passes_per_step": 2},
    "compressed": lambda net: {"compression": hvd.Compression.fp16},
}
STEPS = 3


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data(step: int, rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * number + step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def passes_of(option: str) -> int:
    return 2 if option == "passes" else 1


def backward(net: nn.Module, step: int, rank: int, passes: int) -> None:
    for number in range(passes):
        net(data(step, rank, number)).pow(2).sum().backward()


def values(net: nn.Module) -> Tensors:
    return [p.detach().clone() for p in net.parameters()]


def _train(kind: str, option: str, members: list[int] | None) -> Tensors:
    net = model()
    chosen = hvd.global_process_set if members is None else hvd.add_process_set(members)
    inner = OPTIMIZERS[kind](net.parameters())
    optimizer = hvd.DistributedOptimizer(inner, op=hvd.Adasum, process_set=chosen, **OPTIONS[option](net))
    assert isinstance(optimizer, type(inner))
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, step, hvd.rank(), passes_of(option))
        optimizer.step()
    if members is not None:
        hvd.remove_process_set(chosen)
    return values(net)


def reference(kind: str, option: str, members: list[int]) -> Tensors:
    """Each rank's model takes its own step; then all get the values from before plus the Adasum of the changes."""
    nets = [model() for _ in members]
    optimizers = [OPTIMIZERS[kind](net.parameters()) for net in nets]
    for step in range(STEPS):
        starts = values(nets[0])
        for net, optimizer, rank in zip(nets, optimizers, members, strict=True):
            optimizer.zero_grad()
            backward(net, step, rank, passes_of(option))
            optimizer.step()
        with torch.no_grad():
            columns = zip(*(net.parameters() for net in nets), strict=True)
            for start, column in zip(starts, list(columns), strict=True):
                change = combined([parameter - start for parameter in column])
                for parameter in column:
                    parameter.copy_(start + change)
    return values(nets[0])


def check_models(outcomes: list[Tensors], expected: Tensors, tolerance: float = 1e-9) -> None:
    for outcome in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True)), "ranks differ"
        for ours, theirs in zip(outcome, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_combined(ranks: Ranks, kind: str) -> None:
    outcomes = ranks.run(_train, kind, "named", None)
    check_models(outcomes, reference(kind, "named", list(range(ranks.size))))


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_are_combined_with_each_option(two_ranks: Ranks, option: str) -> None:
    outcomes = two_ranks.run(_train, "sgd", option, None)
    check_models(outcomes, reference("sgd", option, [0, 1]), 5e-3 if option == "compressed" else 1e-9)


def test_steps_are_combined_in_a_process_set(four_ranks: Ranks) -> None:
    outcomes = four_ranks.run(_train, "adam", "plain", [0, 1, 3])
    check_models([outcomes[rank] for rank in (0, 1, 3)], reference("adam", "plain", [0, 1, 3]))
    check_models([outcomes[2]], reference("adam", "plain", [2]))


@pytest.mark.parametrize("option", ["plain", "passes"])
def test_one_rank_steps_as_without(world_of_one: None, option: str) -> None:
    net = model()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, step, 0, passes_of(option))
        optimizer.step()
    check_models([_train("adam", option, None)], values(net), 1e-12)


def _closure() -> tuple[Tensors, float]:
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3), op=hvd.Adasum)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(data(0, hvd.rank())).pow(2).sum()
        loss.backward()
        return loss.detach()

    return values(net), float(optimizer.step(closure))


def test_a_closure_is_the_rank_s_own(two_ranks: Ranks) -> None:
    losses = [loss for _, loss in two_ranks.run(_closure)]
    assert losses == [pytest.approx(model()(data(0, rank)).pow(2).sum().item()) for rank in range(2)]


def _failing() -> tuple[Tensors, Tensors]:
    net = model()
    odd = nn.Parameter(torch.ones(2 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*net.parameters(), odd], 0.1), op=hvd.Adasum)
    (net(data(0, hvd.rank())).sum() + odd.sum()).backward()
    with contextlib.suppress(hvd.HorovodInternalError):
        optimizer.step()
        raise AssertionError("nothing was wrong")
    left = values(net)
    return left, _train("sgd", "plain", None)


def test_after_an_error_parameters_are_where_they_were(two_ranks: Ranks) -> None:
    outcomes = two_ranks.run(_failing)
    for left, _ in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(left, values(model()), strict=True))
    check_models([trained for _, trained in outcomes], reference("sgd", "plain", [0, 1]))


def test_misuse_is_an_assertion_error(world_of_one: None) -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), op=hvd.Adasum)
    backward(net, 0, 0, 1)
    with pytest.raises(AssertionError, match="before step"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        backward(net, 0, 0, 1)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass
    optimizer.synchronize()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="second time"):
        optimizer.step()

"""``SyncBatchNorm`` on real ranks, against torch's batch norm on the ranks' batches together."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import hvdlab.torch as hvd
from support.ranks.resident import RankFailed, Ranks

Outcome = dict[str, torch.Tensor]
STEPS = 3

REFERENCES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
EXTENTS: dict[int, tuple[int, ...]] = {2: (), 3: (4,), 4: (3, 2), 5: (2, 1, 3)}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # number of the input's dimensions, arguments of the layer, how the test uses it
    "2-D": (2, {}, {}),
    "3-D": (3, {}, {}),
    "4-D": (4, {}, {}),
    "5-D": (5, {}, {}),
    "other arguments": (4, {"eps": 0.1, "momentum": 0.7}, {}),
    "cumulative": (4, {"momentum": None}, {}),
    "not affine": (4, {"affine": False}, {}),
    "not tracking": (4, {"track_running_stats": False}, {}),
    "evaluated": (4, {}, {"eval_from": 1}),
    "evaluated without statistics": (4, {"track_running_stats": False}, {"eval_from": 3}),
    "an empty batch": (4, {}, {"rows": (0, 3, 1, 2)}),
    "far from zero": (3, {}, {"offset": 1e5}),
    "channels last": (4, {}, {"format": torch.channels_last}),
    "float32": (4, {}, {"dtype": torch.float32}),
    "bfloat16": (4, {}, {"dtype": torch.bfloat16}),
    "float16": (4, {}, {"dtype": torch.float16}),
    "all of float16": (4, {}, {"dtype": torch.float16, "layer": torch.float16}),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def batch(case: str, step: int, rank: int) -> torch.Tensor:
    """Return a rank's input; its number of rows depends on the rank."""
    dims, _, use = CASES[case]
    rows = use.get("rows", (3, 1, 4, 2))[rank]
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn((rows, 3, *EXTENTS[dims]), generator=generator, dtype=torch.float64)
    found: torch.Tensor = (x * (1 + rank) + use.get("offset", rank)).to(use.get("dtype", torch.float64))
    return found


def layer(case: str, kind: type[Any]) -> nn.Module:
    _, arguments, use = CASES[case]
    made: nn.Module = kind(3, **arguments)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(3, generator=generator))
    dtype = use.get("dtype", torch.float64)
    return made.to(use.get("layer", torch.float64 if dtype is torch.float64 else torch.float32))


def use_layer(case: str, made: nn.Module, batches: list[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Run one forward and backward pass over these ranks' batches together; return their outputs and input gradients."""
    use = CASES[case][2]
    made.train(step < use.get("eval_from", STEPS))
    whole = torch.cat(batches)
    if "format" in use:
        whole = whole.contiguous(memory_format=use["format"])
    whole.requires_grad_()
    output = made(whole)
    assert output.dtype is whole.dtype
    if "format" in use:
        assert output.is_contiguous(memory_format=use["format"])
    # Each value's weight depends only on the value, so that it does not matter which rank has it.
    output.backward(torch.sin(whole.detach() * 3 + step))
    assert whole.grad is not None
    return [output.detach(), whole.grad]


def state(made: nn.Module) -> Outcome:
    return {key: value.clone() for key, value in made.state_dict().items()}


def _on_ranks(case: str) -> tuple[list[list[torch.Tensor]], Outcome, list[torch.Tensor]]:
    made = layer(case, hvd.SyncBatchNorm)
    seen = [use_layer(case, made, [batch(case, step, hvd.rank())], step) for step in range(STEPS)]
    gradients = [p.grad for p in made.parameters() if p.grad is not None]
    return seen, state(made), gradients


@pytest.mark.parametrize("case", CASES)
def test_it_equals_batch_norm_of_all(four_ranks: Ranks, case: str) -> None:
    dims, _, use = CASES[case]
    made = layer(case, REFERENCES[dims])
    dtype = use.get("dtype", torch.float64)
    if use.get("layer") is torch.float16:
        made = made.float()
    tolerance = 1e-4 if case == "far from zero" else TOLERANCE[dtype]

    def close(ours: torch.Tensor, reference: torch.Tensor) -> None:
        torch.testing.assert_close(ours.double(), reference.double(), rtol=tolerance, atol=tolerance)

    outcomes = four_ranks.run(_on_ranks, case)
    for step in range(STEPS):
        batches = [batch(case, step, rank) for rank in range(4)]
        rows = [len(b) for b in batches]
        if made.training and step >= use.get("eval_from", STEPS) and not made.track_running_stats:
            continue
        whole = use_layer(case, made, batches, step)
        for number, reference in enumerate(whole):
            for rank, part in enumerate(reference.split(rows)):
                close(outcomes[rank][0][step][number], part)
    for _, ours, _ in outcomes:
        assert ours.keys() == made.state_dict().keys()
        for key, reference in made.state_dict().items():
            close(ours[key], reference)
            assert torch.equal(ours[key], outcomes[0][1][key]), "ranks differ"
    for number, parameter in enumerate(made.parameters()):
        assert parameter.grad is not None
        close(
            torch.stack([gradients[number].double() for _, _, gradients in outcomes]).sum(0), parameter.grad
        )


def _in_a_set() -> tuple[torch.Tensor, int]:
    trio = hvd.add_process_set([0, 1, 3])
    made = hvd.SyncBatchNorm(3, process_set=trio).double()
    output: torch.Tensor = made(batch("4-D", 0, hvd.rank()))
    hvd.remove_process_set(trio)
    assert made.num_batches_tracked is not None
    return output.detach(), int(made.num_batches_tracked)


def test_a_process_set_and_a_rank_outside(four_ranks: Ranks) -> None:
    outcomes = four_ranks.run(_in_a_set)
    for ranks in ([0, 1, 3], [2]):
        batches = [batch("4-D", 0, rank) for rank in ranks]
        whole = nn.BatchNorm2d(3).double()(torch.cat(batches)).detach()
        for rank, part in zip(ranks, whole.split([len(b) for b in batches]), strict=True):
            torch.testing.assert_close(outcomes[rank][0], part)
    assert [tracked for _, tracked in outcomes] == [1] * 4


def _second_derivative() -> tuple[torch.Tensor, torch.Tensor]:
    x = batch("3-D", 0, hvd.rank()).requires_grad_()
    made = layer("3-D", hvd.SyncBatchNorm)
    (first,) = torch.autograd.grad(made(x).pow(3).sum(), x, create_graph=True)
    assert isinstance(made.weight, nn.Parameter)
    second, weight = torch.autograd.grad(first.pow(2).sum(), [x, made.weight])
    return second, weight


def test_it_is_differentiable_twice(two_ranks: Ranks) -> None:
    batches = [batch("3-D", 0, rank) for rank in range(2)]
    x = torch.cat(batches).requires_grad_()
    made = layer("3-D", nn.BatchNorm1d)
    (first,) = torch.autograd.grad(made(x).pow(3).sum(), x, create_graph=True)
    assert isinstance(made.weight, nn.Parameter)
    second, weight = torch.autograd.grad(first.pow(2).sum(), [x, made.weight])
    outcomes = two_ranks.run(_second_derivative)
    for (ours, _), part in zip(outcomes, second.split([len(b) for b in batches]), strict=True):
        torch.testing.assert_close(ours, part)
    torch.testing.assert_close(sum(ours for _, ours in outcomes), weight)


def net(kind: Any) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(3, 4, 1), kind(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).double()


def train(made: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> list[torch.Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = torch.cat([batch("4-D", step, rank)[:1] for rank in ranks])
        made(whole).pow(2).mean().backward()
        optimizer.step()
    return [value.detach().clone() for value in made.state_dict().values()]


def _trained() -> list[torch.Tensor]:
    made = net(hvd.SyncBatchNorm)
    sgd = torch.optim.SGD(made.parameters(), 0.1, momentum=0.9)
    return train(made, hvd.DistributedOptimizer(sgd, made.named_parameters()), [hvd.rank()])


def test_training_equals_one_process(four_ranks: Ranks) -> None:
    made = net(nn.BatchNorm2d)
    expected = train(made, torch.optim.SGD(made.parameters(), 0.1, momentum=0.9), [0, 1, 2, 3])
    for outcome in four_ranks.run(_trained):
        for ours, reference in zip(outcome, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def _too_little() -> None:
    hvd.SyncBatchNorm(2)(torch.ones(hvd.rank(), 2))


def test_one_value_per_channel_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="more than one value") as failure:
        two_ranks.run(_too_little)
    assert [type(error) for error in failure.value.errors.values()] == [ValueError, ValueError]


def test_one_rank_is_torch_s_own(world_of_one: None) -> None:
    x = batch("4-D", 0, 2)
    ours, reference = hvd.SyncBatchNorm(3).double(), nn.BatchNorm2d(3).double()
    assert torch.equal(ours(x), reference(x))
    assert ours.running_var is not None
    assert reference.running_var is not None
    assert torch.equal(ours.running_var, reference.running_var)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    reference.load_state_dict(torch.load(file))


def test_what_does_not_fit_is_refused(world_of_one: None) -> None:
    with pytest.raises(ValueError, match="two dimensions"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    with pytest.raises(ValueError, match="3 channels was given 2"):
        hvd.SyncBatchNorm(3)(torch.ones(4, 2))
    with pytest.raises(ValueError, match="not registered"):
        hvd.SyncBatchNorm(3, process_set=hvd.ProcessSet([0]))(torch.ones(4, 3))

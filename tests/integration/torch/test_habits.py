"""Common ways of using torch's optimizers, under ``DistributedOptimizer`` on two real ranks.

Each habit is a function that trains a model on the batches of some ranks: on a rank with its own batch, and as the reference, in this
process, with both ranks' batches together. All ranks must end with the same bits.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hvdlab.torch as hvd
from support.ranks.resident import Ranks

STEPS = 4
Wrap = Callable[..., Any]
"""Takes an optimizer and its model, and returns the optimizer: distributed, or as it is."""


def distributed(optimizer: torch.optim.Optimizer, net: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **options)


def alone(optimizer: torch.optim.Optimizer, net: nn.Module, **options: Any) -> Any:
    return optimizer


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batch(step: int, ranks: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    parts = [
        torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
        for rank in ranks
    ]
    return torch.cat(parts).to(dtype)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (net(x) - 0.3).pow(2).mean()
    return result


def values(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def mean_loss(loss: torch.Tensor, wrap: Wrap) -> float:
    """Return the mean of both ranks' losses."""
    return float(hvd.allreduce(loss.detach()) if wrap is distributed else loss.detach())


def plain(ranks: list[int], wrap: Wrap, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Any:
    net = model()
    optimizer = wrap(make(net.parameters()), net, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(step, ranks)).backward()
        optimizer.step()
    return values(net)


def compiled(ranks: list[int], wrap: Wrap, backend: str) -> Any:
    net = model()
    optimizer = wrap(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net)
    if backend == "inductor":
        from torch._inductor import config

        config.compile_threads = 1  # compile in this process
    # The reference is not compiled: compiling must not change the result.
    forward: Any = net if wrap is alone else torch.compile(net, backend=backend)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(forward, batch(step, ranks)).backward()
        optimizer.step()
    return values(net)


def zeroed(ranks: list[int], wrap: Wrap, set_to_none: bool) -> Any:
    net = model()
    optimizer = wrap(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(net, batch(step, ranks)).backward()
        optimizer.step()
        assert all((p.grad is None) is False for p in net.parameters())
    return values(net)


def scaled(ranks: list[int], wrap: Wrap, how: str, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """In the third step rank 1's loss overflows: no rank may take that step, and the scale shrinks on all ranks."""
    net = model(torch.float32)
    optimizer = wrap(make(net.parameters()), net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    before = None
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(net, batch(step, ranks, torch.float32))
        if step == 2:
            before = values(net)
            if 1 in ranks:
                loss = loss * float("inf")
        scaler.scale(loss).backward()
        if how == "plain" or wrap is alone:
            if how == "clipped":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optimizer)
        elif how == "clipped":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optimizer)
        else:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert before is not None
            assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True)), "not skipped"
    return [*values(net), torch.tensor(scaler.get_scale())]


def autocast(ranks: list[int], wrap: Wrap) -> Any:
    net = model(torch.float32)
    optimizer = wrap(torch.optim.AdamW(net.parameters(), 0.01), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, batch(step, ranks, torch.float32))
        loss.backward()
        optimizer.step()
    return values(net)


def accumulated(ranks: list[int], wrap: Wrap, passes: int) -> Any:
    net = model()
    optimizer = wrap(
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, backward_passes_per_step=passes
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            (loss_of(net, batch(10 * step + number, ranks)) / passes).backward()
        optimizer.step()
    return values(net)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
}


def scheduled(ranks: list[int], wrap: Wrap, name: str) -> Any:
    net = model()
    optimizer = wrap(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, batch(step, ranks))
        loss.backward()
        optimizer.step()
        scheduler.step(*[mean_loss(loss, wrap)] if name == "ReduceLROnPlateau" else ())
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert len(set(rates)) > 1, "the schedule did nothing"
    return [*values(net), torch.tensor(rates)]


def parametrized(ranks: list[int], wrap: Wrap) -> Any:
    net = model()
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.orthogonal(net[2])
    optimizer = wrap(torch.optim.Adam(net.parameters(), 0.05), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(step, ranks)).backward()
        optimizer.step()
    return values(net)


def tied(ranks: list[int], wrap: Wrap) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter) * (number + 1))
    net[2].weight = net[0].weight
    optimizer = wrap(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(step, ranks)).backward()
        optimizer.step()
    assert net[2].weight is net[0].weight
    return values(net)


def thawed(ranks: list[int], wrap: Wrap, groups: int) -> Any:
    """Layers freeze and thaw at different times; weight decay would change a frozen parameter that has a gradient."""
    net = model()
    net[4].requires_grad_(False)
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    optimizer = wrap(sgd, net, groups=groups)
    frozen: dict[int, Any] = {1: net[0], 3: net[2], 4: net[0]}
    for step in range(6):
        if step == 2:
            net[4].requires_grad_(True)
        for when, layer in frozen.items():
            layer.requires_grad_(when != step and layer.weight.requires_grad)
        optimizer.zero_grad()
        kept = [values(frozen[step])] if step in frozen else []
        loss_of(net, batch(step, ranks)).backward()
        optimizer.step()
        for before in kept:
            assert all(torch.equal(a, b) for a, b in zip(before, values(frozen[step]), strict=True))
        if step in frozen:
            frozen[step].requires_grad_(True)
    return values(net)


def alternating(ranks: list[int], wrap: Wrap) -> Any:
    """Two optimizers train two halves of a model in turn, as in a GAN, each with the other half frozen."""
    net = model()
    halves = [net[0], net[4]]
    optimizers = [wrap(torch.optim.Adam(half.parameters(), 0.05), half) for half in halves]
    for step in range(STEPS):
        for number, half in enumerate(halves):
            half.requires_grad_(number == step % 2)
        optimizers[step % 2].zero_grad()
        loss_of(net, batch(step, ranks)).backward()
        optimizers[step % 2].step()
    return values(net)


def on_gradients_of_one_s_own(ranks: list[int], wrap: Wrap) -> Any:
    """Gradients that are views of one buffer, and gradients assigned by hand between backward and step."""
    net = model()
    flat = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    optimizer = wrap(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net)
    for step in range(STEPS):
        at = 0
        for parameter in net.parameters():
            parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        flat.zero_()
        loss_of(net, batch(step, ranks)).backward()
        optimizer.step()
        assert flat.any()
    return values(net)


def channels_last(ranks: list[int], wrap: Wrap, groups: int) -> Any:
    """Check that gradients whose memory is in another order than C's are reduced without a copy."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, (2, 1)), nn.Flatten(), nn.Linear(36, 2)
    )
    net = net.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub leaves it out
    optimizer = wrap(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, groups=groups)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, images(step, ranks).contiguous(memory_format=torch.channels_last)).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hvdlab.torch.adapter.TorchAdapter.stage", None)
            optimizer.step()
        assert net[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    return values(net)


def images(step: int, ranks: list[int]) -> torch.Tensor:
    parts = [
        torch.randn(
            2, 3, 6, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64
        )
        for rank in ranks
    ]
    return torch.cat(parts)


HABITS: dict[str, Callable[..., Any]] = {  # which take ranks and a Wrap
    **{
        f"{kind.__name__} {flag}": lambda r, w, kind=kind, flag=flag: plain(
            r, w, lambda ps: kind(ps, lr=0.05, **{flag: True})
        )
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for flag in ("fused", "foreach")
    },
    "two groups": lambda r, w: plain(r, w, lambda ps: torch.optim.Adam(ps, 0.05), groups=2),
    "predivided": lambda r, w: plain(r, w, lambda ps: torch.optim.SGD(ps, 0.1), gradient_predivide_factor=2.0),
    "tensor lr": lambda r, w: plain(r, w, lambda ps: torch.optim.Adam(ps, torch.tensor(0.05))),
    "maximize": lambda r, w: plain(r, w, lambda ps: torch.optim.SGD(ps, 0.05, maximize=True)),
    "factored": lambda r, w: plain(r, w, lambda ps: torch.optim.Adafactor(ps, 0.05)),
    "compiled by aot_eager": lambda r, w: compiled(r, w, "aot_eager"),
    "compiled by inductor": lambda r, w: compiled(r, w, "inductor"),
    "set to none": lambda r, w: zeroed(r, w, True),
    "set to zero": lambda r, w: zeroed(r, w, False),
    **{
        f"scaler {how} {kind.__name__}{' fused' if fused else ''}": lambda r, w, how=how, kind=kind, fused=fused: scaled(
            r, w, how, lambda ps: kind(ps, lr=0.05, fused=fused)
        )
        for how in ("plain", "clipped", "synchronized")
        for kind in (torch.optim.SGD, torch.optim.AdamW)
        for fused in (False, True)
    },
    "autocast": autocast,
    "accumulated": lambda r, w: accumulated(r, w, 3),
    **{f"scheduled {name}": lambda r, w, name=name: scheduled(r, w, name) for name in SCHEDULERS},
    "parametrized": parametrized,
    "tied": tied,
    "thawed": lambda r, w: thawed(r, w, 0),
    "thawed groups": lambda r, w: thawed(r, w, 2),
    "alternating": alternating,
    "own gradients": on_gradients_of_one_s_own,
    "channels last": lambda r, w: channels_last(r, w, 0),
    "channels last in a group": lambda r, w: channels_last(r, w, 1),
}  # fmt: skip
TOLERANCE = {"autocast": 2e-2, **{name: 1e-5 for name in HABITS if name.startswith("scaler")}}


def _on_ranks(name: str) -> Any:
    return HABITS[name]([hvd.rank()], distributed)


# The C++ compiler takes most of a minute.
SLOW = {"compiled by inductor": [pytest.mark.soak]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, [])) for name in HABITS])
def test_ranks_end_as_one_process_would(two_ranks: Ranks, name: str) -> None:
    if "inductor" in name and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    expected = HABITS[name]([0, 1], alone)
    outcomes = two_ranks.run(_on_ranks, name, timeout=100)
    check(outcomes, expected, TOLERANCE.get(name, 1e-9))


def check(outcomes: list[list[torch.Tensor]], expected: list[torch.Tensor], tolerance: float) -> None:
    for outcome in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True)), "ranks differ"
        for ours, reference in zip(outcome, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def _stepping_twice() -> list[str]:
    net = model()
    optimizer = distributed(torch.optim.SGD(net.parameters(), 0.1), net)
    texts = []
    for backward in (True, False, True, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if backward:
                with contextlib.suppress(AssertionError):
                    optimizer.zero_grad()
                loss_of(net, batch(0, [hvd.rank()])).backward()
            optimizer.step()
        texts.append(" ".join(str(w.message) for w in caught))
    return texts


def test_a_second_step_without_a_backward_pass_is_warned_of(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(_stepping_twice):
        assert [bool(text) for text in texts] == [False, True, False, False]
        assert "without a backward pass" in texts[1]


def _collectives_in_compiled_code() -> tuple[list[float], list[float], bool]:
    def function(x: torch.Tensor) -> torch.Tensor:
        handles = [hvd.allreduce_async(x.detach() * number, op=hvd.Sum) for number in range(3)]
        total = torch.stack([hvd.synchronize(handle) for handle in handles]).sum(0)
        return hvd.allreduce(x * 2, op=hvd.Sum).sin() + total * hvd.size()

    x = torch.ones(3, requires_grad=True)
    output = torch.compile(function, backend="aot_eager")(x)
    output.sum().backward()
    assert x.grad is not None
    net = nn.Sequential(nn.Linear(4, 3), hvd.SyncBatchNorm(3), nn.ReLU()).double()
    rows = batch(0, [hvd.rank()])
    as_is = net(rows)
    return output.tolist(), x.grad.tolist(), torch.equal(torch.compile(net, backend="aot_eager")(rows), as_is)


def test_collectives_in_compiled_code(two_ranks: Ranks) -> None:
    expected = torch.tensor(4.0).sin().item() + 2 * 6
    slope = 2 * 2 * torch.tensor(4.0).cos().item()
    for output, gradient, batch_norm in two_ranks.run(_collectives_in_compiled_code, timeout=100):
        assert output == pytest.approx([expected] * 3)
        assert gradient == pytest.approx([slope] * 3)
        assert batch_norm


FROZEN_ON = {1: [0], 2: [0, 1], 3: [1]}
"""By step, the ranks on which the first layer is frozen."""


def _frozen_here_and_there() -> list[torch.Tensor]:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    optimizer = distributed(sgd, net)
    for step in range(5):
        net[0].requires_grad_(hvd.rank() not in FROZEN_ON.get(step, []))
        optimizer.zero_grad()
        loss_of(net, batch(step, [hvd.rank()])).backward()
        optimizer.step()
    return values(net)


def test_a_layer_may_be_frozen_on_some_ranks_only(two_ranks: Ranks) -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for step in range(5):
        sgd.zero_grad()
        for rank in range(2):
            net[0].requires_grad_(rank not in FROZEN_ON.get(step, []))
            (loss_of(net, batch(step, [rank])) / 2).backward()
        sgd.step()
    check(two_ranks.run(_frozen_here_and_there), values(net), 1e-9)


def _outside() -> list[str]:
    first = hvd.add_process_set([0])
    net = model()
    optimizer = distributed(torch.optim.SGD(net.parameters(), 0.1), net, process_set=first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, batch(step, [hvd.rank()])).backward()
            optimizer.step()
    hvd.remove_process_set(first)
    return [str(w.message) for w in caught]


def test_a_rank_outside_is_not_warned_of_steps(two_ranks: Ranks) -> None:
    assert two_ranks.run(_outside) == [[], []]

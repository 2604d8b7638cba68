"""``DistributedOptimizer`` on real ranks, against one process with all ranks' batches."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlab.torch as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, DuplicateNameError, InvalidRequestError
from hvdlab.torch.optimizer import DistributedMixin
from support.ranks.resident import RankFailed, Ranks, meet

BATCH = 3


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2)).double()


def batch(step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size * BATCH, 4, generator=generator, dtype=torch.float64)


def part(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return whole.chunk(size)[rank]


def values(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, 0.05),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 0.05, fused=True),
}
FORMS: dict[str, Callable[[nn.Sequential], dict[str, Any]]] = {
    "plain": lambda net: {},
    "named": lambda net: {"named_parameters": net.named_parameters()},
    "two groups": lambda net: {"named_parameters": net.named_parameters(), "groups": 2},
    "own groups": lambda net: {"groups": [[*net[0].parameters()], [net[2].weight, net[3].bias]]},
    "predivided": lambda net: {"gradient_predivide_factor": 3.0},
}
STEPS = 3


def _train(kind: str, form: str) -> tuple[list[torch.Tensor], bool]:
    rank, size = hvd.rank(), hvd.size()
    net = model(seed=rank)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    inner = OPTIMIZERS[kind](net.parameters())
    optimizer = hvd.DistributedOptimizer(inner, **FORMS[form](net))
    for step in range(STEPS):
        optimizer.zero_grad()
        net(part(batch(step, size), rank, size)).pow(2).mean().backward()
        optimizer.step()
    return values(net), isinstance(optimizer, type(inner))


def in_one_process(kind: str, size: int) -> list[torch.Tensor]:
    net = model()
    optimizer = OPTIMIZERS[kind](net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step, size)).pow(2).mean().backward()
        optimizer.step()
    return values(net)


def check_equal_models(outcomes: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> None:
    for outcome in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True)), "ranks differ"
        for ours, reference in zip(outcome, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_one_process_on_the_union_batch(ranks: Ranks, kind: str) -> None:
    outcomes = ranks.run(_train, kind, "named")
    check_equal_models([parameters for parameters, _ in outcomes], in_one_process(kind, ranks.size))
    assert all(same_class for _, same_class in outcomes)


@pytest.mark.parametrize("form", FORMS)
def test_training_with_each_option(four_ranks: Ranks, form: str) -> None:
    outcomes = four_ranks.run(_train, "sgd", form)
    check_equal_models([parameters for parameters, _ in outcomes], in_one_process("sgd", 4))


def _names(**arguments: Any) -> tuple[list[str], list[str]]:
    net = model()
    sgd = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[2].parameters()}], 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, **arguments)
    optimizer.add_param_group({"params": net[3].parameters()})
    return [optimizer._parameter_names[p] for group in optimizer.param_groups for p in group["params"]], [
        optimizer._parameter_names[p] for p in net[0].parameters()
    ]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=lambda op: op.name)
def test_the_names_of_parameters_can_be_read(world_of_one: None, op: Any) -> None:
    net = model()
    named = dict(net.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), named.items(), op=op)
    assert optimizer._parameter_names == {parameter: name for name, parameter in named.items()}
    unnamed, first = _names(op=op)
    assert unnamed == [f"group{g}.param{i}" for g in range(3) for i in range(2)]
    assert first == ["group0.param0", "group0.param1"]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=lambda op: op.name)
def test_what_it_was_made_with_can_be_read(world_of_one: None, op: Any) -> None:
    sgd = torch.optim.SGD(model().parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, op=op, backward_passes_per_step=2)
    assert (optimizer.op, optimizer.backward_passes_per_step) == (op, 2)
    assert optimizer.process_set is hvd.global_process_set
    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3
    optimizer.backward_passes_per_step = 4
    assert optimizer._watcher.passes == 4
    if op is hvd.Average:
        optimizer = hvd.DistributedOptimizer(sgd, gradient_predivide_factor=2.0, sparse_as_dense=True)
        assert (optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (2.0, True)


def _train_compressed() -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    inner = OPTIMIZERS["sgd"](net.parameters())
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), hvd.Compression.fp16, groups=1)
    net(part(batch(0, size), rank, size)).pow(2).mean().backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in net.parameters())
    return values(net)


def test_compressed_gradients_are_those_of_float16(two_ranks: Ranks) -> None:
    net = model()
    net(batch(0, 2)).pow(2).mean().backward()
    expected = [
        p.detach() - 0.1 * (p.grad + 0.01 * p.detach()) for p in net.parameters() if p.grad is not None
    ]
    for outcome in two_ranks.run(_train_compressed):
        for ours, reference in zip(outcome, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-3)
        assert not all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))


def _sum_of_passes(passes: int) -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(
        sgd, net.named_parameters(), backward_passes_per_step=passes, op=hvd.Sum
    )
    watcher: Any = optimizer._watcher
    for step in range(passes):
        net(part(batch(step, size), rank, size)).pow(2).sum().backward()
        in_flight = any(bucket.work is not None for bucket in watcher._buckets)
        assert in_flight == (step == passes - 1)
    optimizer.step()
    return values(net)


def test_gradients_of_several_passes_are_added_up_before_they_are_sent(ranks: Ranks) -> None:
    net = model()
    for step in range(2):
        net(batch(step, ranks.size)).pow(2).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    check_equal_models(ranks.run(_sum_of_passes, 2), values(net))


class Branching(nn.Module):
    """Each rank's forward pass uses a layer of its own, and a layer that all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(4, 4)
        self.own = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        result: torch.Tensor = self.own[rank](self.shared(x))
        return result


def _train_branching(groups: int) -> list[torch.Tensor]:
    net = Branching().double()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), groups=groups)
    for step in range(2):
        optimizer.zero_grad()
        net(part(batch(step, hvd.size()), hvd.rank(), hvd.size()), hvd.rank()).pow(2).mean().backward()
        optimizer.step()
    return values(net)


@pytest.mark.parametrize("groups", [0, 3])
def test_parameters_that_a_rank_does_not_use_count_as_zero(four_ranks: Ranks, groups: int) -> None:
    net = Branching().double()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        sgd.zero_grad()
        parts = [net(x, rank).pow(2).mean() for rank, x in enumerate(batch(step, 4).chunk(4))]
        torch.stack(parts).mean().backward()
        sgd.step()
    check_equal_models(four_ranks.run(_train_branching, groups), values(net))


def _closure() -> tuple[list[torch.Tensor], float, int]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4), net.named_parameters(), op=hvd.Sum
    )
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: torch.Tensor = net(part(batch(0, size), rank, size)).pow(2).sum()
        loss.backward()
        return hvd.allreduce(loss.detach(), op=hvd.Sum)

    loss = optimizer.step(closure)
    return values(net), float(loss), calls


def test_a_closure_s_gradients_are_reduced_each_time(two_ranks: Ranks) -> None:
    net = model()
    lbfgs = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss: torch.Tensor = net(batch(0, 2)).pow(2).sum()
        loss.backward()
        return loss

    loss = lbfgs.step(closure).item()
    outcomes = two_ranks.run(_closure)
    check_equal_models([parameters for parameters, _, _ in outcomes], values(net))
    assert all(ours == pytest.approx(loss) and calls > 1 for _, ours, calls in outcomes)


def _clipped() -> tuple[list[torch.Tensor], list[str]]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            net(part(batch(step, size), rank, size)).pow(2).mean().backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        quiet = len(caught)
        net(part(batch(3, size), rank, size)).pow(2).mean().backward()
        optimizer.synchronize()
        before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        sums = values(net)
        optimizer.step()  # averages the averages, which changes nothing
        after = [p.grad for p in net.parameters() if p.grad is not None]
        assert all(torch.allclose(a, b) for a, b in zip(before, after, strict=True))
    assert quiet == 0
    return sums, [str(w.message) for w in caught]


def test_synchronize_then_skip_it_in_step(two_ranks: Ranks) -> None:
    net = model()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        sgd.zero_grad()
        net(batch(step, 2)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        sgd.step()
    outcomes = two_ranks.run(_clipped)
    check_equal_models([parameters for parameters, _ in outcomes], values(net))
    assert all(len(texts) == 1 and "skip_synchronize" in texts[0] for _, texts in outcomes)


def _schedule_and_hooks() -> tuple[float, int, int, list[str]]:
    net = model()
    inner = torch.optim.SGD(net.parameters(), 1.0)
    early = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)  # wraps inner.step, since it is made before
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    before, after = [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(1))
    optimizer.register_step_post_hook(lambda *_: after.append(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(batch(0, 1)).sum().backward()
        optimizer.step()
        late.step()
    texts = [str(w.message) for w in caught]
    assert early.optimizer is inner
    return optimizer.param_groups[0]["lr"], len(before), len(after), texts


def test_schedulers_and_step_hooks_work(two_ranks: Ranks) -> None:
    assert two_ranks.run(_schedule_and_hooks) == [(pytest.approx(0.1), 1, 1, [])] * 2


def _added_later() -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net[3].parameters(), 0.1), net.named_parameters())
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.2})
    net(part(batch(0, size), rank, size)).pow(2).mean().backward()
    optimizer.step()
    return values(net)


def test_parameters_added_later_are_reduced_too(two_ranks: Ranks) -> None:
    net = model()
    groups: list[dict[str, Any]] = [
        {"params": net[3].parameters()},
        {"params": net[0].parameters(), "lr": 0.2},
    ]
    sgd = torch.optim.SGD(groups, 0.1)
    net(batch(0, 2)).pow(2).mean().backward()
    sgd.step()
    check_equal_models(two_ranks.run(_added_later), values(net))


def _saved_and_loaded() -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](net.parameters()), net.named_parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        net(part(batch(number, size), rank, size)).pow(2).mean().backward()
        optimizer.step()

    step(0)
    state, weights = optimizer.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
    net(part(batch(9, size), rank, size)).sum().backward()  # a step that loading a state drops
    optimizer.synchronize()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](net.parameters()), net.named_parameters())
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    step(1)
    step(2)
    return values(net)


def test_state_dict_goes_on_where_it_was_saved(two_ranks: Ranks) -> None:
    check_equal_models(two_ranks.run(_saved_and_loaded), in_one_process("adam", 2))


def _train_in_a_set() -> list[torch.Tensor]:
    rank = hvd.rank()
    pair = hvd.add_process_set([1, 3])
    net = model()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), process_set=pair)
    for step in range(2):
        optimizer.zero_grad()
        net(part(batch(step, 4), rank, 4)).pow(2).mean().backward()
        optimizer.step()
    hvd.remove_process_set(pair)
    return values(net)


def test_ranks_of_a_process_set_train_together_and_others_alone(four_ranks: Ranks) -> None:
    outcomes = four_ranks.run(_train_in_a_set)
    for members in ([1, 3], [0], [2]):
        net = model()
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(2):
            sgd.zero_grad()
            parts = batch(step, 4).chunk(4)
            net(torch.cat([parts[rank] for rank in members])).pow(2).mean().backward()
            sgd.step()
        check_equal_models([outcomes[rank] for rank in members], values(net))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(6, 3, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.table(rows).pow(2).sum()
        return result


def _train_sparse(as_dense: bool) -> tuple[list[torch.Tensor], bool]:
    net = Embedding()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), sparse_as_dense=as_dense)
    net(torch.tensor([hvd.rank(), 5])).backward()
    optimizer.step()
    gradient = net.table.weight.grad
    assert gradient is not None
    return values(net), gradient.is_sparse


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(ranks: Ranks, as_dense: bool) -> None:
    net = Embedding()
    rows = torch.tensor([row for rank in range(ranks.size) for row in (rank, 5)])
    (net(rows) / ranks.size).backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    for parameters, sparse in ranks.run(_train_sparse, as_dense):
        torch.testing.assert_close(parameters, values(net))
        assert sparse


# -- errors -----------------------------------------------------------------------------------------------------------


def _gan(advised: bool, named: bool) -> tuple[list[torch.Tensor], list[bool]]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    sgd = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, critic)]
    of_generator = hvd.DistributedOptimizer(sgd[0])
    of_critic = hvd.DistributedOptimizer(sgd[1], critic.named_parameters() if named else None)
    noise = torch.full((1, 2), hvd.rank() + 1.0)
    try:
        for _ in range(3):
            of_critic.zero_grad()
            critic(generator(noise).detach()).sum().backward()
            of_critic.step()
            of_generator.zero_grad()
            if advised:
                critic.requires_grad_(False)
            critic(generator(noise)).pow(2).sum().backward()
            critic.requires_grad_(True)
            of_generator.step()
    finally:
        of_generator._watcher.drop()
        of_critic._watcher.drop()
    return values(nn.Sequential(generator, critic)), [p.grad is not None for p in critic.parameters()]


def test_another_loss_s_gradients_are_explained(two_ranks: Ranks) -> None:
    for named, error in ((True, "zero_grad"), (False, "named_parameters=")):
        text = rf"{error}.* generator loss .* requires_grad_\(False\) on that module before"
        with pytest.raises(RankFailed, match=text):
            two_ranks.run(_gan, False, named)
    (one, _), (other, _) = two_ranks.run(_gan, True, False)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _two_without_names(named: bool) -> None:
    nets = [model(0), model(1)]
    names = [
        [(f"{which}.{name}", p) for name, p in net.named_parameters()] if named else None
        for which, net in zip("DG", nets, strict=True)
    ]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), named_parameters)
        for net, named_parameters in zip(nets, names, strict=True)
    ]
    try:
        torch.stack([net(batch(0, 1)).sum() for net in nets]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    except (AbortedError, DuplicateNameError):
        # The other rank may have begun an operation that this one never calls, or do so when it learns of this error.
        context.engine().withdraw("this rank gave up")
        meet()
        raise
    finally:
        for optimizer in optimizers:
            optimizer._watcher.drop()


def test_two_optimizers_without_names(two_ranks: Ranks) -> None:
    with pytest.raises(
        RankFailed, match=r"`grad\.group0.* another DistributedOptimizer .* named_parameters="
    ):
        two_ranks.run(_two_without_names, False)
    two_ranks.run(_two_without_names, True)


def _misuse(which: str) -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    net(batch(0, 1)).sum().backward()
    try:
        if which == "zero_grad":
            optimizer.zero_grad()
        else:
            net(batch(0, 1)).sum().backward()
    finally:
        optimizer.synchronize()  # works: the group goes on
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("which", "text"), [("zero_grad", "before step"), ("backward", "backward_passes_per_step")]
)
def test_misuse_is_an_error_on_every_rank(two_ranks: Ranks, which: str, text: str) -> None:
    with pytest.raises(RankFailed) as failure:
        two_ranks.run(_misuse, which)
    assert [type(error) for error in failure.value.errors.values()] == [AssertionError] * 2
    assert all(text in str(error) for error in failure.value.errors.values())


def _wrong_shape_then_right() -> tuple[str, list[torch.Tensor]]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    odd = nn.Linear(3, 2 + rank).double()
    both = nn.ModuleList([net, odd])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both.parameters(), 0.1), both.named_parameters())
    before = values(net)
    (net(part(batch(0, size), rank, size)).pow(2).mean() + odd(torch.ones(3).double()).sum()).backward()
    with pytest.raises(hvd.HorovodInternalError) as error:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(net), before, strict=True)), (
        "a failed step changed them"
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    optimizer.zero_grad()
    net(part(batch(0, size), rank, size)).pow(2).mean().backward()
    optimizer.step()
    return str(error.value), values(net)


def test_after_a_failed_step_the_next_one_works(two_ranks: Ranks) -> None:
    net = model()
    net(batch(0, 2)).pow(2).mean().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    outcomes = two_ranks.run(_wrong_shape_then_right)
    check_equal_models([parameters for _, parameters in outcomes], values(net))
    assert all("grad.1." in text and "disagree" in text for text, _ in outcomes)


def _made_again(from_the_first: bool) -> tuple[list[torch.Tensor], str]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    first = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    net(part(batch(7, size), rank, size)).pow(2).mean().backward()  # in flight while the second is made
    inner = first if from_the_first else torch.optim.SGD(net.parameters(), 0.1)
    second = hvd.DistributedOptimizer(inner, net.named_parameters())
    second.zero_grad()
    net(part(batch(0, size), rank, size)).pow(2).mean().backward()
    second.step()
    with pytest.raises(InvalidRequestError) as error:
        first.step()
    return values(net), str(error.value)


@pytest.mark.parametrize("from_the_first", [False, True])
def test_an_optimizer_made_anew_takes_over(two_ranks: Ranks, from_the_first: bool) -> None:
    net = model()
    net(batch(0, 2)).pow(2).mean().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    outcomes = two_ranks.run(_made_again, from_the_first)
    check_equal_models([parameters for parameters, _ in outcomes], values(net))
    assert all("newer" in text for _, text in outcomes)


def _forgotten() -> int:
    net = model()
    hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    gc.collect()
    if hvd.rank() == 0:  # no other rank would take part
        net(batch(0, 1)).sum().backward()
    return len(context.engine().pending())


def test_a_forgotten_optimizer_reduces_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(_forgotten) == [0, 0]


def _interrupt_once_it_waits() -> threading.Thread:
    """Start a thread that sends SIGINT to this rank when its main thread waits for a collective."""
    main = threading.main_thread().ident or 0

    def press() -> None:
        while "wait_for" not in (
            frame.name for frame in traceback.extract_stack(sys._current_frames()[main])
        ):
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def _meet() -> None:
    """Meet in a barrier, which the interrupt of the other rank may abort once."""
    with contextlib.suppress(hvd.HorovodInternalError):
        return hvd.barrier()
    hvd.barrier()


def _interrupted() -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    if rank == 0:
        net(part(batch(7, size), rank, size)).pow(2).mean().backward()
        thread = _interrupt_once_it_waits()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        thread.join()
    _meet()
    optimizer.zero_grad()
    net(part(batch(0, size), rank, size)).pow(2).mean().backward()
    optimizer.step()
    return values(net)


def test_after_an_interrupted_step_the_next_one_works() -> None:
    net = model()
    net(batch(0, 2)).pow(2).mean().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    with Ranks(2, imports=["hvdlab.torch"]) as ranks:
        check_equal_models(ranks.run(_interrupted), values(net))


def _after_a_failed_cell() -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
    engine = context.engine()
    engine.begin_cell("first")
    net(part(batch(7, size), rank, size)).pow(2).mean().backward()
    engine.end_cell("first", "NameError: a slip between backward and step")
    engine.begin_cell("second")
    optimizer.zero_grad()
    net(part(batch(0, size), rank, size)).pow(2).mean().backward()
    optimizer.step()
    engine.end_cell("second")
    return values(net)


def test_a_cell_that_failed_after_backward_can_be_run_again(two_ranks: Ranks) -> None:
    net = model()
    net(batch(0, 2)).pow(2).mean().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    check_equal_models(two_ranks.run(_after_a_failed_cell), values(net))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, InvalidRequestError, "Average"),
        ({"op": hvd.Max}, InvalidRequestError, "max"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, InvalidRequestError, "Average"),
        ({"backward_passes_per_step": 0}, InvalidRequestError, "at least 1"),
        ({"named_parameters": [("a", torch.ones(1))]}, InvalidRequestError, "missing"),
        ({"named_parameters": [("a", torch.ones(1)), ("a", torch.ones(2))]}, InvalidRequestError, "unique"),
        ({"named_parameters": model().parameters()}, InvalidRequestError, "pairs"),
        ({"groups": -2}, InvalidRequestError, "groups"),
        ({"process_set": hvd.ProcessSet([0])}, InvalidRequestError, "not registered"),
        ({"process_set": hvd.ProcessSet([0]), "op": hvd.Adasum}, InvalidRequestError, "not registered"),
        ({"groups": 1.5}, InvalidRequestError, "groups"),
        ({"groups": "two"}, InvalidRequestError, "groups"),
        ({"groups": list(model().parameters())}, InvalidRequestError, "list of lists"),
    ],
)
def test_wrong_arguments(
    world_of_one: None, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.1), **arguments)
    assert isinstance(raised.value, ValueError)


def test_num_groups_is_deprecated(world_of_one: None) -> None:
    net = model()
    with pytest.warns(DeprecationWarning, match="groups="):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), num_groups=2)
    assert isinstance(optimizer, DistributedMixin)
    assert [len(bucket.parameters) for bucket in optimizer._watcher._buckets] == [3, 3]


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's warning of a reference cycle
def test_gradients_that_require_gradients_are_refused(world_of_one: None) -> None:
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))
    loss = net(batch(0, 1)).pow(2).sum()
    with pytest.raises(AssertionError, match="create_graph"):
        loss.backward(create_graph=True)
    net.zero_grad()
    assert optimizer.param_groups

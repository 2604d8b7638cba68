"""``hvd.watch()`` and the step times of distributed optimizers."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.bindings import monitoring
from hvdlab.bindings.monitoring import StepMeter
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.tracing.record_format import Metric, decode
from hvdlab.torch.monitoring import MOST_WAITING, AsyncScalars, gradient_norm
from support.engine_probe import EngineProbe
from support.metric_points import recorded_points
from support.ranks.resident import Ranks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, world_of_one: None) -> None:
    """Make this process the only rank; only the test empties its recorder."""
    monkeypatch.setattr(EngineProbe(context.engine()).handlers, "schedule_events", lambda: None)


def taken() -> list[Metric]:
    """Return the metrics recorded since the last call, without the samples of the process."""
    batches = context.engine().recorder.drain()
    events = [event for batch in batches for event in decode(batch).events if isinstance(event, Metric)]
    return [event for event in events if event.name not in ("hvdlab/cpu", "hvdlab/rss", "hvdlab/threads")]


def values(name: str, events: list[Metric]) -> list[tuple[Any, Any]]:
    return [(event.step, event.value) for event in events if event.name == f"hvdlab/{name}"]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


# -- steps --------------------------------------------------------------------------------------------------------


def test_a_distributed_optimizer_tells_the_time_of_its_steps(alone: None) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01))
    begin = time.monotonic()
    train(model, optimizer, 5)
    took = time.monotonic() - begin
    found = values("step_time", taken())
    assert [step for step, _ in found] == [2, 3, 4, 5]  # the first step has none before it
    assert 0 < sum(seconds for _, seconds in found) < took


def test_adasum_tells_it_too(alone: None) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), op=hvd.Adasum)
    train(model, optimizer, 3)
    assert [step for step, _ in values("step_time", taken())] == [2, 3]


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_each_step_counts_once_however_it_is_watched(alone: None, wrapped_first: bool) -> None:
    model = net()
    optimizer: Any = torch.optim.Adam(model.parameters())
    if wrapped_first:
        optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.watch(model, optimizer, batch_size=16)
    else:
        hvd.watch(model, optimizer, batch_size=16)
        optimizer = hvd.DistributedOptimizer(optimizer)
    train(model, optimizer, 4)
    events = taken()
    times = values("step_time", events)
    assert [step for step, _ in times] == [2, 3, 4]
    assert values("samples_per_second", events) == [(step, 16 / seconds) for step, seconds in times]


class Clock:
    def __init__(self) -> None:
        self.now = 10**9

    def monotonic_ns(self) -> int:
        return self.now


def test_what_passes_between_cells_is_no_step(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    clock = Clock()
    monkeypatch.setattr(monitoring, "time", clock)
    meter = StepMeter()
    meter.batch_size = 32
    engine = context.engine()
    for cell in ("one", "two"):
        engine.begin_cell(cell)
        for _ in range(2):
            clock.now += 500_000_000
            meter.step()
        engine.end_cell(cell)
        clock.now += 3600 * 10**9
    events = taken()
    assert values("step_time", events) == [(2, 0.5), (4, 0.5)]
    assert values("samples_per_second", events) == [(2, 64.0), (4, 64.0)]
    assert {event.time_ns for event in events} == {2 * 10**9, 3603 * 10**9}


def test_without_a_world_steps_are_counted_only(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = hvd.watch(model, optimizer, every=1)
    train(model, optimizer, 2)
    assert len(values("step_time", taken())) == 1
    hvd.shutdown()
    train(model, optimizer, 2)
    hvd.init()
    monkeypatch.setattr(EngineProbe(context.engine()).handlers, "schedule_events", lambda: None)
    train(model, optimizer, 2)
    events = taken()
    assert [step for step, _ in values("step_time", events)] == [6]
    assert [step for step, _ in values("learning_rate", events)] == [5, 6]
    assert watch.step == 6


# -- gradients ----------------------------------------------------------------------------------------------------


def expected_norm(model: torch.nn.Module) -> float:
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(gradients).norm())


@pytest.mark.parametrize("distributed", [False, True])
def test_the_norm_is_that_of_all_gradients_every_so_many_steps(alone: None, distributed: bool) -> None:
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.watch(model, optimizer, every=2)
    expected = []
    for step in range(1, 7):
        train(model, optimizer)
        if step % 2 == 0:
            expected.append((step, pytest.approx(expected_norm(model), rel=1e-5)))
    assert values("gradient_norm", taken()) == expected


def test_every_0_never_looks_at_the_gradients(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hvd.watch(model, optimizer, every=0)
    train(model, optimizer, 3)
    events = taken()
    assert values("gradient_norm", events) == []
    assert len(values("step_time", events)) == 2


def test_frozen_parameters_have_none(alone: None) -> None:
    model = net()
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert gradient_norm(model.parameters()) is None


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_norms_of_every_element_type(dtype: torch.dtype) -> None:
    parameters = [torch.zeros(1000, dtype=dtype, requires_grad=True) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 200.0)  # its square is too large for float16
    norm = gradient_norm(parameters)
    assert norm is not None
    assert float(norm) == pytest.approx(200 * 2000**0.5, rel=1e-3)


def test_sparse_gradients_count_their_sums() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    norm = gradient_norm(table.parameters())
    assert float(norm or 0) == pytest.approx((3 * 2**2 + 3 * 1**2) ** 0.5)


def test_with_a_closure_it_is_that_of_the_last_gradients(alone: None) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    hvd.watch(model, optimizer, every=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert values("gradient_norm", taken()) == [(1, pytest.approx(expected_norm(model), rel=1e-5))]


# -- scales and rates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_scale_is_told_and_not_in_the_norm(alone: None, fused: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hvd.watch(model, optimizer, scaler=scaler, every=1)
    scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    events = taken()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    assert values("loss_scale", events) == [(1, 1024.0)]
    assert values("gradient_norm", events) == [(1, pytest.approx(expected_norm(model), rel=1e-4))]


def test_the_learning_rate_is_told_of_each_step(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    hvd.watch(model, optimizer)
    for _ in range(4):
        train(model, optimizer)
        schedule.step()
    assert values("learning_rate", taken()) == [(1, 0.8), (2, 0.8), (3, 0.4), (4, 0.4)]


def test_groups_with_different_rates_are_told_apart(alone: None) -> None:
    model = net()
    first, _, last = model
    groups = [
        {"params": first.parameters(), "lr": 0.1, "name": "body"},
        {"params": last.parameters(), "lr": torch.tensor(0.5)},
    ]
    optimizer = torch.optim.SGD(groups)
    hvd.watch(model, optimizer)
    train(model, optimizer)
    events = taken()
    assert values("learning_rate/body", events) == [(1, 0.1)]
    assert values("learning_rate/1", events) == [(1, 0.5)]


# -- its life -----------------------------------------------------------------------------------------------------


def test_watching_again_replaces_the_watch(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hvd.watch(model, optimizer, every=1)
    train(model, optimizer)
    watch = hvd.watch(model, optimizer, every=1, batch_size=8)
    train(model, optimizer)
    events = taken()
    assert [step for step, _ in values("gradient_norm", events)] == [1, 2]
    assert [step for step, _ in values("step_time", events)] == [2]
    assert (watch.batch_size, watch.step) == (8, 2)


def test_closing_a_replaced_watch_leaves_its_successor(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = hvd.watch(model, optimizer, every=1)
    hvd.watch(model, optimizer, every=1)
    first.close()
    hvd.watch(model, optimizer, every=1)
    train(model, optimizer)
    assert [step for step, _ in values("gradient_norm", taken())] == [1]


def test_it_goes_on_where_a_training_ended(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = hvd.watch(model, optimizer)
    watch.step = 1000
    watch.batch_size = 4
    train(model, optimizer, 2)
    assert [step for step, _ in values("samples_per_second", taken())] == [1002]


def test_closing_ends_it(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hvd.watch(model, optimizer, every=1) as watch:
        assert repr(watch) == "<Watch of Sequential, 0 steps>"
    watch.close()
    train(model, optimizer)
    assert taken() == []


def test_a_watch_keeps_no_model_alive(alone: None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hvd.watch(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": 3}, "torch.nn.Module, not a int"),
        ({"optimizer": "sgd"}, "torch optimizer, not a str"),
        ({"scaler": 2.0}, "GradScaler, not a float"),
        ({"every": -1}, "number of steps, not -1"),
        ({"batch_size": 0}, "number of samples in a step, not 0"),
        ({"batch_size": float("nan")}, "number of samples in a step"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], text: str) -> None:
    model = net()
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **change}
    with pytest.raises(InvalidRequestError, match=text):
        hvd.watch(**arguments)


# -- numbers that come late ---------------------------------------------------------------------------------------


class Event:
    """A device's event that comes when the test sets ``done``."""

    def __init__(self) -> None:
        self.done, self.waited = False, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited = True


def test_what_a_device_computes_is_recorded_when_it_is_there() -> None:
    recorded: list[tuple[str, float, int, int]] = []
    scalars = AsyncScalars(lambda *one: recorded.append(one))
    first, second = Event(), Event()
    scalars.add_copy("norm", torch.tensor(1.0), first, 10, 100)
    scalars.add_copy("norm", torch.tensor(2.0), second, 20, 200)
    assert recorded == []
    first.done = True
    scalars.poll()
    assert recorded == [("norm", 1.0, 10, 100)]
    scalars.drain()
    assert recorded == [("norm", 1.0, 10, 100), ("norm", 2.0, 20, 200)]
    assert not first.waited
    assert second.waited


def test_a_device_that_is_far_behind_is_waited_for() -> None:
    recorded: list[tuple[str, float, int, int]] = []
    scalars = AsyncScalars(lambda *one: recorded.append(one))
    events = [Event() for _ in range(MOST_WAITING + 2)]
    for number, event in enumerate(events):
        scalars.add_copy("norm", torch.tensor(float(number)), event, number, number)
    assert [value for _, value, _, _ in recorded] == [0.0, 1.0]


# -- in a world ---------------------------------------------------------------------------------------------------


def norms(steps: int) -> list[tuple[Any, Any]]:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01))
    hvd.watch(model, optimizer, every=1)
    with recorded_points() as points:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return points()["gradient_norm"]


def test_ranks_see_the_norm_of_the_reduced_gradients() -> None:
    with Ranks(2, imports=["hvdlab.torch"]) as ranks:
        first, second = ranks.run(norms, 4, timeout=60)
    assert first == second
    assert [step for step, _ in first] == [1, 2, 3, 4]

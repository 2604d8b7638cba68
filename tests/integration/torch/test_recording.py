"""``hvd.record()``: the last steps, and the batch that made the training fail."""

from __future__ import annotations

import pickle

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.bindings import step_record
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.monitoring import TorchRecord


@pytest.fixture(autouse=True)
def alone(world_of_one: None) -> None:
    """Make this process the only rank."""


def train(recorded: TorchRecord, model: torch.nn.Module, steps: int, bad: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(recorded._before_step)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        batch = torch.randn(5, 4, generator=generator)
        if step == bad:
            batch[2, 1] = torch.nan
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        recorded.loss(loss)
        loss.backward()
        optimizer.step()


def test_the_last_steps_are_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    with hvd.record(model, last=7) as recorded:
        train(recorded, model, 20)
        assert [step.number for step in recorded.steps] == list(range(14, 21))
        assert recorded.first_wrong is None
        assert len(recorded.lines()) == step_record.SHOWN
        assert f"loss {float(recorded.steps[-1].loss):.6g}" in recorded.lines()[-1]
        assert "[0] float32[5, 4] #" in recorded.lines()[-1]
        assert float(recorded.steps[-1].norm or 0) > 0
        model.eval()
        model(torch.ones(1, 4))
        assert recorded.steps[-1].number == 20
    assert step_record.newest() is None


def test_the_record_that_was_written_last_is_shown_also_if_another_one_is_longer() -> None:
    first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    with hvd.record(first) as longer, hvd.record(second) as shorter:
        train(longer, first, 9)
        train(shorter, second, 2)
        assert step_record.newest() is shorter
        train(longer, first, 1)
        assert step_record.newest() is longer


def test_the_batch_that_went_wrong_is_found_and_replayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
    with hvd.record(model, last=10) as recorded:
        train(recorded, model, 9, bad=4)
        wrong = recorded.first_wrong
        assert wrong is not None
        assert (wrong.number, wrong.wrong) == (4, "inputs")
        lines, told = step_record.recent()
        assert lines[0].endswith("<- the first that is not finite: inputs")
        assert "NOT FINITE" in told
        assert step_record.suspects() == (4, 0, told)
        found: step_record.Replay = pickle.loads(pickle.dumps(recorded.replay()))  # noqa: S301  # made here
        assert (found.rank, found.step) == (0, 4)
        assert torch.isnan(found.args[0]).nonzero().tolist() == [[2, 1]]
        good = recorded.replay(3)
        fresh = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.5))
        assert torch.equal(good.run(fresh), good.run(fresh))  # the same elements are dropped out
        with pytest.raises(LookupError, match="step 77 is not kept; steps 1 to 9 are"):
            recorded.replay(77)


def test_what_goes_wrong_without_its_inputs_is_found_as_well() -> None:
    model = torch.nn.Linear(4, 2)
    with hvd.record(model, loss=(criterion := torch.nn.MSELoss())) as recorded:
        criterion(model(torch.ones(2, 4)), torch.ones(2, 2))
        with torch.no_grad():
            model.weight.fill_(torch.inf)
        criterion(model(torch.ones(2, 4)), torch.ones(2, 2))
        assert recorded.first_wrong is recorded.steps[1]
        assert recorded.steps[1].wrong == "loss"


def test_what_is_well_again_is_not_told() -> None:
    with hvd.record() as recorded:
        for loss in (1.0, torch.nan, 1.0, torch.inf, torch.nan):
            recorded.batch(torch.ones(1))
            recorded.loss(loss)
        recorded.batch(torch.ones(1))  # a step that was stopped here
        assert recorded.first_wrong is recorded.steps[3]
        recorded.loss(1.0)
        assert recorded.first_wrong is None


def test_batches_are_kept_as_long_as_there_is_room() -> None:
    with hvd.record(last=5, memory=1000) as recorded:
        for _ in range(5):
            recorded.batch({"x": torch.ones(100)}, y=[torch.ones(3), "text"])  # 412 bytes
        assert [step.batch is not None for step in recorded.steps] == [False, False, False, True, True]
        assert str(recorded.steps[0]).startswith("step 1  [0].x float32[100] #")
        with pytest.raises(LookupError, match="`memory=` of"):
            recorded.replay(1)


def test_closing_a_replaced_record_leaves_its_successor() -> None:
    model = torch.nn.Linear(1, 1)
    first, second = hvd.record(model), hvd.record(model)
    first.close()
    third = hvd.record(model)
    model(torch.ones(1, 1))
    assert (len(second.steps), len(third.steps)) == (0, 1)
    third.close()


def test_arguments() -> None:
    with pytest.raises(InvalidRequestError, match="model= of"):
        hvd.record(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="from 1, not 0"):
        hvd.record(last=0)
    model = torch.nn.Linear(1, 1)
    first, second = hvd.record(model), hvd.record(model)
    model(torch.ones(1, 1))
    assert (len(first.steps), len(second.steps)) == (0, 1)
    second.close()
    with pytest.raises(LookupError, match="nothing was recorded"):
        step_record.replay()

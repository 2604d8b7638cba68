"""``metric()`` on ranks, and what a recording elsewhere has of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hvdlab.collectives import api, context
from hvdlab.collectives.client import Client
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import InvalidRequestError, NotInitializedError
from hvdlab.collectives.recording import Recording
from hvdlab.collectives.timeline.events import Metric
from hvdlab.collectives.timeline.records import decode
from ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def recording(two: Ranks) -> Iterator[Recording]:
    with Client.connect(two.coordinator.address, two.coordinator.token) as client:
        yield client.recording


@pytest.fixture
def world_of_one() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


def named(recording: Recording, name: str, count: int) -> list[tuple[int, float, float, int]]:
    """Wait until there are ``count`` metrics of that name: rank, value, step (NaN: none) and time of each."""
    deadline = Deadline(10)
    while True:
        version = recording.version
        found = [
            (rank, *point)
            for rank in (0, 1)
            for point in recording.points(rank, name)[["value", "step", "time"]].tolist()
        ]
        if len(found) >= count:
            return found
        assert recording.wait(version, timeout=deadline.remaining()), f"{len(found)} of {count} came"


def taken() -> list[Metric]:
    """What was recorded in this process and is still here."""
    batches = context.engine().recorder.drain()
    return [event for batch in batches for event in decode(batch).events if isinstance(event, Metric)]


def record(name: str, value: float) -> tuple[int, int]:
    begin = time.monotonic_ns()
    api.metric(name, value, 7)
    api.metric(name, value * 2)
    return begin, time.monotonic_ns()


def test_what_ranks_record_is_in_a_recording_at_once(two: Ranks, recording: Recording) -> None:
    times = two.run(record, per_rank=[("loss", 0.5), ("loss", 1.5)])
    found = named(recording, "loss", 4)
    assert {(rank, value, None if math.isnan(step) else step) for rank, value, step, _ in found} == {
        (0, 0.5, 7),
        (0, 1.0, None),
        (1, 1.5, 7),
        (1, 3.0, None),
    }
    for rank, _, _, time_ns in found:
        assert times[rank][0] <= time_ns <= times[rank][1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([[2.0]]), 2.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[1.5]], requires_grad=True), 1.5),
        (torch.tensor(4, dtype=torch.bfloat16), 4.0),
        (math.inf, math.inf),
    ],
)
def test_anything_that_is_one_number_is_taken(world_of_one: None, value: object, expected: float) -> None:
    api.metric("it", value, np.int64(3))  # type: ignore[arg-type]  # tensors are not known to mypy as numbers
    assert [(event.value, event.step) for event in taken()] == [(expected, 3)]


def test_nan_is_kept(world_of_one: None) -> None:
    api.metric("it", math.nan)
    assert math.isnan(taken()[0].value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("loss", torch.ones(2)), "Tensor of shape (2,)"),
        (("loss", np.ones(3)), "ndarray of shape (3,)"),
        (("loss", "much"), "not a str"),
        (("loss", None), "not a NoneType"),
        (("loss", 1j), "not a complex"),
        (("loss", 10**400), "not a int"),
        (("", 1.0), "needs a name"),
        ((b"loss", 1.0), "needs a name"),
        (("loss", 1.0, 0.5), "whole number"),
        (("loss", 1.0, 1 << 63), "whole number"),
    ],
)
def test_what_is_not_a_number_is_refused_in_words(
    world_of_one: None, arguments: tuple[object, ...], text: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        api.metric(*arguments)  # type: ignore[arg-type]  # that is the point
    assert text in str(caught.value)
    assert taken() == []


def test_before_init_it_says_so() -> None:
    with pytest.raises(NotInitializedError, match=r"hvd\.metric\(\)"):
        api.metric("loss", 1.0)

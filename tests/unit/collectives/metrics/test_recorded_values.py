"""Values that ``metric()`` accepts as a number, and those that it refuses. Separate from the ranks' functions, which
need no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, NotInitializedError
from hvdlab.collectives.tracing.record_format import Metric, decode

torch = pytest.importorskip("torch")


@pytest.fixture
def world_of_one() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


def taken() -> list[Metric]:
    """Return the records of this process that are still here."""
    batches = context.engine().recorder.drain()
    return [event for batch in batches for event in decode(batch).events if isinstance(event, Metric)]


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
    hvd.metric("it", value, np.int64(3))  # type: ignore[arg-type]  # tensors are not known to mypy as numbers
    assert [(event.value, event.step) for event in taken()] == [(expected, 3)]


def test_nan_is_kept(world_of_one: None) -> None:
    hvd.metric("it", math.nan)
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
        hvd.metric(*arguments)  # type: ignore[arg-type]  # that is the point
    assert text in str(caught.value)
    assert taken() == []


def test_before_init_it_says_so() -> None:
    with pytest.raises(NotInitializedError, match=r"hvd\.metric\(\)"):
        hvd.metric("loss", 1.0)

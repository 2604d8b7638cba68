"""A call's description to the coordinator, and the parts that only recordings keep."""

from __future__ import annotations

import numpy as np

from hvdlab.collectives.engine.entries import Entry, Locals
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.types import SUM, DType, OpKind, ReduceOp, Reduction


def entry(about: str, reduction: Reduction = SUM) -> Entry:
    x = np.ones(4, np.float32)
    return Entry(Request(OpKind.ALLREDUCE, "x", x, x, DType.F32, reduction, about=about), "train.py:3", 1)


def test_what_a_call_is_about_stands_behind_its_line_for_all_ranks() -> None:
    found = Locals()
    layer, other, plain = (found.local_of(entry(about)) for about in (" for layers.3", " for layers.4", ""))
    assert [each.site for each in (layer, other, plain)] == [
        "train.py:3 for layers.3",
        "train.py:3 for layers.4",
        "train.py:3",
    ]
    assert len({layer.id, other.id, plain.id}) == 3
    assert found.local_of(entry(" for layers.3")) is layer, "it is defined once"
    assert layer.signature == plain.signature, "ranks need not be in the same part of a model"


def test_all_nan_factors_share_an_id_which_their_reductions_alone_would_not() -> None:
    found = Locals()
    first, second = (entry("", Reduction(ReduceOp.SUM, float("nan"), 2.0)) for _ in range(2))
    assert first.request.reduction.prescale is not second.request.reduction.prescale
    assert found.local_of(first) is found.local_of(second)
    assert len(found) == 1
    assert found.local_of(entry("", Reduction(ReduceOp.SUM, 2.0, float("nan")))).id == 1

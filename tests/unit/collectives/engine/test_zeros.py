"""Zeros of a rank that has joined, in the place of a tensor of any size that other ranks choose."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlab.collectives.engine.entries import Entry, Fail
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import SUM, DType, OpKind


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1 << 55,), DType.F32), ((1 << 62, 4), DType.F32), ((-1,), DType.F32), ((4,), 999)]
)
def test_rank_that_lacks_room_for_zeros_gives_the_generation_up(shape: tuple[int, ...], dtype: int) -> None:
    state = RankState(1)
    members = tuple(m.Member(rank, "host", 1) for rank in (0, 1))
    state.handle(m.Configure(0, 1, members, "shm", {}), 0)
    x = np.ones(4, np.float32)
    before = Entry(Request(OpKind.ALLREDUCE, "before", x, x, DType.F32, SUM), "site", 1)
    joining = Entry(Request(OpKind.JOIN), "join", 2)
    for entry in before, joining:
        state.submit(entry)
    state.take_messages()
    large = m.Signature(int(OpKind.ALLREDUCE), "large", int(dtype), 1, shape)
    order = m.Execute(0, 1, 1, (m.Batch((before.local.id,)), m.Batch((-1,), zeros=(large,))))
    assert [effect.entries for effect in state.handle(order, 0)] == [(before,)]  # type: ignore[union-attr]  # only orders
    (withdrawal,) = state.take_messages()
    assert isinstance(withdrawal, m.Withdraw)
    assert "can't make the zeros" in withdrawal.text
    assert state.handle(m.Execute(0, 1, 2, (m.Batch((joining.local.id,)),)), 0) == []
    assert state.finish(before)
    ended = state.handle(m.Abort(0, 1, withdrawal.kind, (1,), withdrawal.text, "", ()), 0)
    assert [effect.entry for effect in ended if isinstance(effect, Fail)] == [joining]
    state.validate()

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.reduce import (
    BLOCK,
    MANY,
    NARROW,
    Conversion,
    FoldScratch,
    conversion_of,
    make_fold,
    narrow_bf16,
    register_conversion,
    widen_bf16,
)
from hvdlab.collectives.types import SUM, DType, ReduceOp

Array = npt.NDArray[Any]


def fold(dtype: DType, op: ReduceOp, sources: list[Array], pre: float = 1.0, post: float = 1.0) -> Array:
    out = np.empty_like(sources[0])
    make_fold(dtype, op)(sources, out, pre, post)
    return out


def bf16(values: list[float]) -> Array:
    out = np.empty(len(values), np.uint16)
    narrow_bf16(np.array(values, np.float32), out)
    return out


def test_adds_in_the_order_of_the_sources() -> None:
    parts = [np.array([v], np.float32) for v in (1e8, 1.0, -1e8)]
    assert fold(DType.F32, ReduceOp.SUM, parts)[0] == (np.float32(1e8) + np.float32(1.0)) - np.float32(1e8)
    assert fold(DType.F32, ReduceOp.SUM, [parts[0], parts[2], parts[1]])[0] == 1.0


def test_out_may_be_the_first_source() -> None:
    for dtype in (DType.F32, DType.I32, DType.F16, DType.BF16):
        first, second = (np.arange(5).astype(storage_type(dtype)) for _ in range(2))
        expected = fold(dtype, ReduceOp.SUM, [first.copy(), second], 2.0, 0.5)
        make_fold(dtype, ReduceOp.SUM)([first, second], first, 2.0, 0.5)
        assert np.array_equal(first, expected)


@pytest.mark.parametrize(
    ("dtype", "values", "scale", "expected"),
    [
        (DType.I32, [7, -7, 1], 0.5, [3, -3, 0]),
        (DType.U8, [255, 3], 0.34, [86, 1]),
        (DType.I64, [3, -5], 1 / 3, [1, -1]),
    ],
)
def test_integers_are_scaled_toward_zero(
    dtype: DType, values: list[int], scale: float, expected: list[int]
) -> None:
    source = np.array(values, storage_type(dtype))
    assert fold(dtype, ReduceOp.SUM, [source], post=scale).tolist() == expected
    assert fold(dtype, ReduceOp.SUM, [source, np.zeros_like(source)], pre=scale).tolist() == expected


def test_integers_wrap_around() -> None:
    parts = [np.array([200], np.uint8)] * 2
    assert fold(DType.U8, ReduceOp.SUM, parts)[0] == 400 % 256


def test_bool_is_and_or() -> None:
    parts = [np.array([True, True, False]), np.array([True, False, False])]
    assert fold(DType.BOOL, ReduceOp.MIN, parts).tolist() == [True, False, False]
    assert fold(DType.BOOL, ReduceOp.MAX, parts).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.F16])
def test_minimum_and_maximum_keep_nan(dtype: DType) -> None:
    parts = [np.array([np.nan, 1.0], storage_type(dtype)), np.array([1.0, np.nan], storage_type(dtype))]
    assert np.isnan(fold(dtype, ReduceOp.MIN, parts)).all()
    assert np.isnan(fold(dtype, ReduceOp.MAX, parts)).all()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("members", [1, 2, MANY - 1, MANY, 100])
@pytest.mark.parametrize("length", [0, 1, 3, NARROW, NARROW + 1])
def test_rows_of_an_array_give_the_bits_of_a_list(dtype: DType, members: int, length: int) -> None:
    """… so a result does not depend on how members' tensors lie in memory."""
    random = np.random.default_rng(members * length)
    memory = random.integers(0, 256, (members, 64 + length * 8), np.uint8)
    rows = memory[:, : length * storage_type(dtype).itemsize].view(storage_type(dtype))
    if dtype is DType.BOOL:
        rows = rows.view(np.uint8) % 2 == 1
    for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        for scales in ((1.0, 1.0), (1.0, 0.5), (2.0, 1.0)):
            if dtype is DType.BOOL and scales != (1.0, 1.0):
                continue
            before, one, other = rows.copy(), np.empty(length, rows.dtype), np.empty(length, rows.dtype)
            with np.errstate(all="ignore"):
                make_fold(dtype, op)([np.ascontiguousarray(row) for row in rows], one, *scales)
                make_fold(dtype, op)(rows, other, *scales)
            assert one.tobytes() == other.tobytes(), (op, scales)
            assert rows.tobytes() == before.tobytes()


@pytest.mark.parametrize("length", [0, 1, BLOCK, 2 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [DType.F32, DType.I16, DType.F16, DType.BF16])
def test_long_buffers_are_scaled_block_by_block(dtype: DType, length: int) -> None:
    parts = [np.full(length, 8, storage_type(dtype)) for _ in range(3)]
    if dtype is DType.BF16:
        parts = [bf16([8.0] * length) for _ in range(3)]
    out = fold(dtype, ReduceOp.SUM, parts, 0.5, 2.0)
    wide = np.empty(length, np.float32)
    if dtype is DType.BF16:
        widen_bf16(out, wide)
    else:
        wide[:] = out
    assert (wide == 24.0).all()


def test_halves_round_once() -> None:
    # 2048 + 1 + 1 is 2050 in float32; rounding after each step would stay at 2048.
    parts = [np.array([v], np.float16) for v in (2048.0, 1.0, 1.0)]
    assert fold(DType.F16, ReduceOp.SUM, parts)[0] == 2050.0
    assert fold(DType.BF16, ReduceOp.SUM, [bf16([256.0]), bf16([1.0]), bf16([1.0])])[0] == bf16([258.0])[0]


def test_an_intermediate_sum_beyond_float16_is_no_infinity() -> None:
    parts = [np.array([60000.0], np.float16), np.array([60000.0], np.float16)]
    assert fold(DType.F16, ReduceOp.SUM, parts, post=0.5)[0] == np.float16(60000.0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_bfloat16_rounds_to_nearest_even(patterns: list[int]) -> None:
    wide = np.array(patterns, np.uint32).view(np.float32)
    out = np.empty(len(wide), np.uint16)
    narrow_bf16(wide.copy(), out)
    for value, bits in zip(wide.tolist(), out.tolist(), strict=True):
        back = float(np.array([bits << 16], np.uint32).view(np.float32)[0])
        if np.isnan(value):
            assert np.isnan(back)
            continue
        low, high = (np.array([max(0, b) << 16], np.uint32).view(np.float32)[0] for b in (bits - 1, bits + 1))
        if np.isinf(back):
            assert (
                abs(value) >= 3.3961775292304957e38
            )  # halfway between the largest bfloat16 and the next power
            continue
        for neighbour in (low, high):
            if np.isfinite(neighbour) and (bits & 0x7FFF):
                assert abs(value - back) <= abs(value - float(neighbour))
                if abs(value - back) == abs(value - float(neighbour)):
                    assert bits % 2 == 0


def test_every_bfloat16_survives_the_way_there_and_back() -> None:
    every = np.arange(65536, dtype=np.uint16)
    wide = np.empty(65536, np.float32)
    widen_bf16(every, wide)
    nan = np.isnan(wide)
    out = np.empty_like(every)
    narrow_bf16(wide, out)
    assert np.array_equal(out[~nan], every[~nan])
    widen_bf16(out, wide)
    assert np.isnan(wide[nan]).all()


def test_a_binding_can_register_a_faster_conversion() -> None:
    original = conversion_of(DType.BF16)
    used: list[str] = []

    def widen(source: Array, out: npt.NDArray[np.float32]) -> None:
        used.append("widen")
        original.widen(source, out)

    try:
        register_conversion(DType.BF16, Conversion(widen, original.narrow))
        fold(DType.BF16, ReduceOp.SUM, [bf16([1.0]), bf16([2.0])])
    finally:
        register_conversion(DType.BF16, original)
    assert used == ["widen", "widen"]
    with pytest.raises(ValueError, match="float32"):
        register_conversion(DType.F32, original)


@pytest.mark.parametrize("in_context", [True, False])
def test_folds_ignore_overflow_and_nan_whatever_the_thread_does(
    in_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlab.collectives.reduce._ERRORS_IN_CONTEXT", in_context)
    scratch, out = FoldScratch(), np.empty(2, np.float32)
    sources = [np.array([3e38, np.inf], np.float32), np.array([3e38, -np.inf], np.float32)]
    with np.errstate(all="raise"):
        scratch.fold(DType.F32, SUM, sources, out)
        assert np.geterr()["over"] == "raise"
    assert out[0] == np.inf
    assert np.isnan(out[1])

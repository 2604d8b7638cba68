"""The tree and the arithmetic; ``conformance/planes/test_adasum.py`` runs it over the planes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.planes.adasum_cases import expected
from hvdlab.collectives.reduce import adasum, levels, products
from hvdlab.collectives.types import DType, ReduceOp, Reduction


@pytest.mark.parametrize("members", range(1, 40))
def test_every_member_but_the_first_is_used_up_once(members: int) -> None:
    pairs = list(chain.from_iterable(levels(members)))
    assert sorted(b for _, b in pairs) == list(range(1, members))
    gone: set[int] = set()
    for a, b in pairs:
        assert not {a, b} & gone
        gone.add(b)


def test_the_tree_is_that_of_distance_doubling() -> None:
    assert levels(1) == []
    assert levels(4) == [[(0, 1), (2, 3)], [(0, 2)]]
    assert levels(5) == [[(0, 4)], [(0, 1), (2, 3)], [(0, 2)]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_any_number_of_vectors(members: int, count: int, seed: int) -> None:
    vectors = list(np.random.default_rng(seed).normal(size=(members, count)))
    before = [v.copy() for v in vectors]
    np.testing.assert_allclose(adasum(vectors, DType.F64), expected(vectors), rtol=1e-9, atol=1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(vectors, before, strict=True))


def test_it_is_homogeneous_and_bounded_by_the_sum_of_norms() -> None:
    vectors = list(np.random.default_rng(1).normal(size=(6, 50)))
    once = adasum(vectors, DType.F64)
    np.testing.assert_allclose(
        adasum(vectors, DType.F64, Reduction(ReduceOp.ADASUM, 3.0, 0.5)), once * 1.5, rtol=1e-12
    )
    assert np.linalg.norm(once) <= sum(np.linalg.norm(v) for v in vectors)


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32, DType.F64])
def test_zeros_and_what_underflows_give_no_nan(dtype: DType) -> None:
    storages: dict[DType, type[np.floating[Any]]] = {
        DType.F16: np.float16,
        DType.F32: np.float32,
        DType.F64: np.float64,
    }
    storage = storages[dtype]
    tiny = np.full(4, np.finfo(storage).tiny, storage)
    zeros, ones = np.zeros(4, storage), np.ones(4, storage)
    assert np.array_equal(adasum([zeros, ones, zeros], dtype), ones)
    assert np.array_equal(adasum([zeros, zeros], dtype), zeros)
    assert np.isfinite(adasum([tiny, ones], dtype)).all()


def test_dot_products_of_float32_are_accumulated_in_float64() -> None:
    vectors = np.full((2, 100_000), 1.1, np.float32)
    ((row,),) = products(vectors, [(0, 1)], [(0, 0, 100_000)], 1)
    assert row == pytest.approx([100_000 * float(np.float32(1.1)) ** 2] * 3, rel=1e-12)

"""Elements of arrays, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvdlab.kernel_ext.rank import object_tree
from hvdlab.kernel_ext.rank.object_tree import array_source, compare, not_finite
from hvdlab.kernel_ext.wire.compare import Difference


def differ(ours: Any, theirs: Any) -> Difference:
    a, b = array_source(ours), array_source(theirs)
    assert a is not None
    assert b is not None
    return compare(a.read(0, a.nbytes), b.read(0, b.nbytes), a.dtype, a.itemsize)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u8"])
def test_the_first_and_the_largest_difference(dtype: str) -> None:
    a, b = np.ones(200_000, dtype), np.ones(200_000, dtype)
    b[150_000], b[199_999] = 3, 5
    found = differ(a, b)
    assert (found.count, found.first, found.largest, found.relative) == (2, 150_000, 4.0, pytest.approx(0.8))
    assert (float(found.here), float(found.there)) == (1, 3)


def test_the_brain_float() -> None:
    a, b = torch.ones(5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)
    b[3] = 2
    assert differ(a, b) == Difference(1, 3, "1.0", "2.0", 1.0, 0.5)


def test_large_whole_numbers_are_exact() -> None:
    assert differ(np.array([2**62]), np.array([2**62 + 1])).largest == 1.0
    assert differ(np.array([-(2**63)]), np.array([2**63 - 1])).largest == float(2**64 - 1)


def test_nan_and_infinity() -> None:
    found = differ(np.array([np.nan, 1.0, 2.0]), np.array([1.0, 1.0, 2.5]))
    assert (found.count, found.here, found.largest) == (2, "nan", 0.5)
    assert differ(np.array([np.nan]), np.array([1.0])).largest is None
    assert differ(np.array([np.inf]), np.array([1.0])).largest == np.inf
    assert not_finite(np.array([np.nan, np.inf, -np.inf, 1]).view(np.uint8), "float64", 8) == (1, 2)
    assert not_finite(np.arange(5).view(np.uint8), "int64", 8) == (0, 0)


def test_minus_zero_differs_by_nothing() -> None:
    assert differ(np.array([0.0]), np.array([-0.0])) == Difference(1, 0, "0.0", "-0.0", 0.0, 0.0)


def test_what_has_no_magnitude_is_compared_by_its_bytes() -> None:
    assert differ(np.array(["abc", "x"]), np.array(["abc", "y"])) == Difference(1, 1, "x", "y")
    pairs = np.zeros(3, "i4,i8"), np.zeros(3, "i4,i8")
    pairs[1][2] = (0, 1)
    assert (differ(*pairs).count, differ(*pairs).first) == (1, 2)
    eights = torch.zeros(3).to(torch.float8_e4m3fn), torch.tensor([0.0, 1, 0]).to(torch.float8_e4m3fn)
    assert (differ(*eights).count, differ(*eights).first, differ(*eights).largest) == (1, 1, None)


def test_equal_arrays_do_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_tree, "STRIDE", 7 * 8)
    a = np.arange(100.0)
    assert differ(a, a.copy()).count == 0
    b = a.copy()
    b[6:9] = 0
    assert (differ(a, b).count, differ(a, b).first) == (3, 6)

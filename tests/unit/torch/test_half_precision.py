from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from hvdlab.collectives import reduce
from hvdlab.collectives.types import DType
from hvdlab.torch.adapter import register_conversions

EVERY_BIT_PATTERN = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {dtype: reduce.conversion_of(dtype) for dtype in (DType.F16, DType.BF16)}
    yield
    for dtype, conversion in before.items():
        reduce.register_conversion(dtype, conversion)


def _bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


@pytest.mark.parametrize(
    ("dtype", "storage", "reference"),
    [(DType.F16, np.float16, reduce.widen_f16), (DType.BF16, np.uint16, reduce.widen_bf16)],
)
def test_widening_gives_numpy_s_values(
    dtype: DType, storage: type[np.generic], reference: Callable[..., None]
) -> None:
    register_conversions()
    source = EVERY_BIT_PATTERN.view(storage)
    ours, expected = np.empty((2, source.size), np.float32)
    reduce.conversion_of(dtype).widen(source, ours)
    reference(source, expected)
    assert np.array_equal(_bits(ours), _bits(expected))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_narrowing_undoes_widening_and_rounds_to_nearest_even(dtype: DType) -> None:
    register_conversions()
    conversion = reduce.conversion_of(dtype)
    storage = np.float16 if dtype is DType.F16 else np.uint16
    wide = np.empty(EVERY_BIT_PATTERN.size, np.float32)
    conversion.widen(EVERY_BIT_PATTERN.view(storage), wide)
    back = np.empty(wide.size, storage)
    numbers = ~np.isnan(wide)
    conversion.narrow(wide.copy(), back)
    assert np.array_equal(back.view(np.uint16)[numbers], EVERY_BIT_PATTERN[numbers])

    step = 2.0**-10 if dtype is DType.F16 else 2.0**-7  # between 1 and its next neighbour
    halfway = np.array([1 + step / 2, 1 + step * 3 / 2, 1 + step * 0.51, np.nan], np.float32)
    rounded = np.empty(4, storage)
    conversion.narrow(halfway.copy(), rounded)
    widened = np.empty(4, np.float32)
    conversion.widen(rounded, widened)
    assert widened[:3].tolist() == [1.0, 1 + 2 * step, 1 + step]
    assert np.isnan(widened[3])


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_what_came_in_a_message_is_read_without_a_warning(dtype: DType) -> None:
    register_conversions()
    conversion = reduce.conversion_of(dtype)
    storage = np.float16 if dtype is DType.F16 else np.uint16
    narrow, wide = np.zeros(3, storage), np.ones(3, np.float32)
    for array in (narrow, wide):
        array.flags.writeable = False
    found, rounded = np.empty(3, np.float32), np.empty(3, storage)
    conversion.widen(narrow, found)
    conversion.narrow(wide, rounded)
    assert found.tolist() == [0.0] * 3
    conversion.widen(rounded, found)
    assert found.tolist() == [1.0] * 3

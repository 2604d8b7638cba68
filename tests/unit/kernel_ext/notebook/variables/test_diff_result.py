"""Text about a comparison."""

from __future__ import annotations

import pytest

from hvdlab.kernel_ext.notebook.variables.diff import Diff, ValueGroup
from hvdlab.kernel_ext.wire.compare import ComparisonOpened


def diff(*ranks: tuple[int, ...], unknown: int = 0, left_out: int = 0, named: tuple[str, ...] = ()) -> Diff:
    return Diff(
        "x",
        tuple(
            ValueGroup(
                alike,
                ComparisonOpened(
                    1, bytes([n]), "Net", unknown=unknown, left_out=left_out, unknown_parts=named
                ),
            )
            for n, alike in enumerate(ranks)
        ),
    )


def test_agree_is_not_said_of_what_was_not_compared() -> None:
    assert (diff((0, 1)).agree, diff((0, 1)).headline()) == (True, "x: ranks 0,1 agree (Net)")
    one = diff((0, 1), unknown=1, named=("._lock (lock)",))
    assert (one.agree, one.whole, one.odd) == (False, False, ())
    assert one.headline() == "x: no difference found on ranks 0,1, 1 part not compared (Net)"
    assert one.notes() == ["not compared: ._lock (lock)"]
    many = diff((0, 1), unknown=5, left_out=2, named=("a", "b", "c"))
    assert many.headline() == "x: no difference found on ranks 0,1, 7 parts not compared (Net)"
    assert many.notes()[0] == "not compared: a, b, c and 2 more"


@pytest.mark.parametrize(("unknown", "left_out"), [(1, 0), (0, 1)])
def test_nor_of_those_that_differ_from_others(unknown: int, left_out: int) -> None:
    found = diff((0, 2), (1,), unknown=unknown, left_out=left_out)
    assert found.headline() == (
        "x: no difference found among ranks 0,2, 1 part not compared (Net); rank 1 differs"
    )

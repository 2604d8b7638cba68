"""Which gradients are reduced together, and under which names."""

from __future__ import annotations

import pytest

from hvdlab.bindings.gradient_reducer import bucketed, check_unique
from hvdlab.collectives.errors import InvalidRequestError


def names_of(parameters: list[int]) -> dict[int, str]:
    return {p: f"grad.{p}" for p in parameters}


def is_parameter(value: object) -> bool:
    return isinstance(value, int)


def test_every_parameter_has_a_bucket_of_its_own_without_groups() -> None:
    buckets = bucketed([0, 1, 2], names_of([0, 1, 2]), 0, is_parameter)
    assert buckets == [("grad.0", [0]), ("grad.1", [1]), ("grad.2", [2])]


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
def test_a_number_of_groups_divides_the_parameters_evenly(count: int, sizes: list[int]) -> None:
    parameters = [0, 1, 2, 3, 4]
    buckets = bucketed(parameters, names_of(parameters), count, is_parameter)
    assert sorted(len(group) for _, group in buckets) == sizes
    assert [p for _, group in buckets for p in group] == parameters
    assert len({name for name, _ in buckets}) == len(buckets)


def test_parameters_in_no_group_stay_alone() -> None:
    buckets = bucketed([0, 1, 2, 3], names_of([0, 1, 2, 3]), [[3, 1]], is_parameter)
    assert buckets == [("grad.3+1", [3, 1]), ("grad.0", [0]), ("grad.2", [2])]


def test_a_group_may_name_parameters_of_others() -> None:
    assert bucketed([0, 1], names_of([0, 1]), [[0, 2]], is_parameter) == [("grad.0", [0]), ("grad.1", [1])]


def test_bad_groups_are_refused() -> None:
    names = names_of([0, 1])
    with pytest.raises(InvalidRequestError, match="more than once"):
        bucketed([0, 1], names, [[0], [0]], is_parameter)
    with pytest.raises(InvalidRequestError, match="number"):
        bucketed([0, 1], names, -1, is_parameter)
    with pytest.raises(InvalidRequestError, match="lists of parameters"):
        bucketed([0, 1], names, [["weight"]], is_parameter)  # type: ignore[misc]
    with pytest.raises(InvalidRequestError, match="lists of parameters"):
        bucketed([0, 1], names, ["weight"], is_parameter)  # type: ignore[misc]


def test_names_that_come_twice_are_named() -> None:
    check_unique(["a", "b"], "variables=")
    with pytest.raises(InvalidRequestError, match=r"in variables= must be unique; these are not: a, c\."):
        check_unique(["c", "a", "b", "a", "c"], "variables=")

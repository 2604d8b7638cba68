from __future__ import annotations

import pytest
import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.buckets import bucketed, checked_names, gradient_names


def parameters(count: int) -> list[torch.Tensor]:
    return [torch.zeros(1, requires_grad=True) for _ in range(count)]


def named(ps: list[torch.Tensor]) -> dict[torch.Tensor, str]:
    return {p: f"grad.{i}" for i, p in enumerate(ps)}


def same(group: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(group) == len(expected) and all(a is b for a, b in zip(group, expected, strict=True))


def test_every_parameter_has_a_bucket_of_its_own_without_groups() -> None:
    ps = parameters(3)
    assert [name for name, _ in bucketed(ps, named(ps), 0)] == ["grad.0", "grad.1", "grad.2"]


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
def test_a_number_of_groups_divides_the_parameters_evenly(count: int, sizes: list[int]) -> None:
    ps = parameters(5)
    buckets = bucketed(ps, named(ps), count)
    assert sorted(len(group) for _, group in buckets) == sizes
    assert same([p for _, group in buckets for p in group], ps)
    assert len({name for name, _ in buckets}) == len(buckets)


def test_parameters_in_no_group_stay_alone() -> None:
    ps = parameters(4)
    buckets = bucketed(ps, named(ps), [[ps[3], ps[1]]])
    assert [name for name, _ in buckets] == ["grad.3+1", "grad.0", "grad.2"]
    assert same(buckets[0][1], [ps[3], ps[1]])


def test_a_group_may_name_parameters_of_others() -> None:
    ps = parameters(3)
    ((_, group), (_, rest)) = bucketed(ps[:2], named(ps), [[ps[0], ps[2]]])
    assert same(group, [ps[0]])
    assert same(rest, [ps[1]])


def test_bad_groups_are_refused() -> None:
    ps = parameters(2)
    with pytest.raises(InvalidRequestError, match="more than once"):
        bucketed(ps, named(ps), [[ps[0]], [ps[0]]])
    with pytest.raises(InvalidRequestError, match="number"):
        bucketed(ps, named(ps), -1)
    with pytest.raises(InvalidRequestError, match="lists of parameters"):
        bucketed(ps, named(ps), [["weight"]])


def test_names_must_be_pairs_unique_and_complete() -> None:
    ps = parameters(2)
    groups = [{"params": ps}]
    assert checked_names(None, groups) == {}
    assert list(checked_names([("a", ps[0]), ("b", ps[1]), ("c", torch.ones(1))], groups).values()) == [
        "a",
        "b",
        "c",
    ]
    with pytest.raises(InvalidRequestError, match="unique; these are not: a"):
        checked_names([("a", ps[0]), ("a", ps[1])], groups)
    with pytest.raises(InvalidRequestError, match=r"missing: param_groups\[0\]\['params'\]\[1\]"):
        checked_names([("a", ps[0])], groups)
    with pytest.raises(InvalidRequestError, match="pairs"):
        checked_names(ps, groups)


def test_gradients_are_named_by_parameter_or_by_place() -> None:
    ps = parameters(3)
    groups = [{"params": ps[:1]}, {"params": ps[1:]}]
    names = gradient_names(groups, {ps[0]: "fc.weight"})
    assert [names[p] for p in ps] == ["grad.fc.weight", "grad.group1.param0", "grad.group1.param1"]

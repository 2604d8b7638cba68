from __future__ import annotations

import pytest
import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.optimizer import checked_names, gradient_names


def parameters(count: int) -> list[torch.Tensor]:
    return [torch.zeros(1, requires_grad=True) for _ in range(count)]


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
        checked_names(ps, groups)  # type: ignore[arg-type]  # on purpose


def test_gradients_are_named_by_parameter_or_by_place() -> None:
    ps = parameters(3)
    groups = [{"params": ps[:1]}, {"params": ps[1:]}]
    names = gradient_names(groups, {ps[0]: "fc.weight"})
    assert [names[p] for p in ps] == ["grad.fc.weight", "grad.group1.param0", "grad.group1.param1"]

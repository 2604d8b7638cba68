"""Values taken apart, whatever they are made of."""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from hvdlab.kernel_ext.inspect.examination import Examination
from hvdlab.kernel_ext.inspect.leaves import MOST_LEAVES, leaves_of


def leaves(value: Any) -> dict[str, tuple[str, str]]:
    return {found.path: (found.kind, found.text) for found in leaves_of(value).found}


def digest(value: Any) -> bytes:
    return Examination(value).examined(1).digest


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.drop = torch.nn.Dropout(0.25)


def test_a_modules_parts_have_the_names_of_its_state_dict() -> None:
    found = leaves(Net())
    arrays = [path.removeprefix(".") for path, (kind, _) in found.items() if kind == "array"]
    assert sorted(arrays) == sorted(Net().state_dict())
    assert found[".drop.p"] == ("value", "0.25")


def test_an_optimizers_settings_and_state_are_parts() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model.fc(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = leaves(optimizer)
    assert found[".param_groups[0]['lr']"] == ("value", "0.5")
    assert found[".state[0]['exp_avg']"][0] == "array"


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    size: int = 3


class Weird:
    def __init__(self, inside: int = 1) -> None:
        self.inside = inside

    def __repr__(self) -> str:
        raise SystemError("no")

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "__class__"):
            raise SystemError("no")
        return object.__getattribute__(self, name)


class Endless(dict[str, int]):
    def items(self) -> Any:
        while True:
            pass

    __iter__ = __len__ = __repr__ = items  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", "b"),
        ("a", b"a"),
        ((1, 2), [1, 2]),
        ({}, []),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({1, 2}, {1, 3}),
        (list(range(1000)), [*range(999), 0]),
        (list(map(str, range(1000))), [*map(str, range(999)), ""]),
        (10**400, 10**400 + 1),
        (np.float32(1), np.float64(1)),
        (np.zeros(3), np.zeros((3, 1))),
        (np.array([{"a": 1}, None]), np.array([{"a": 2}, None])),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.zeros(3), torch.zeros(3, requires_grad=True)),
        (torch.tensor(1 + 2j), torch.tensor(1 + 3j)),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
        (torch.zeros(2), torch.nn.Parameter(torch.zeros(2), requires_grad=False)),
        (Slotted(1), Slotted(2)),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.deque([1]), collections.deque([2])),
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
        (len, print),
        (lambda: 1, lambda: 2),
    ],
)
def test_what_differs_has_another_fingerprint(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest([one]) != digest([other])
    assert digest(one) == digest(one)


def test_classes_of_the_user_are_not_asked() -> None:
    weird = [digest(Weird(inside)) for inside in (1, 1, 2)]
    assert weird[0] == weird[1] != weird[2]
    endless = [digest(Endless(a=inside)) for inside in (1, 1, 2)]
    assert endless[0] == endless[1] != endless[2]


def test_equal_values_have_one_fingerprint() -> None:
    same = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Colour.RED, Colour.RED),
        ({"x", "y", "z"}, {"z", "y", "x"}),
    ]
    same += [(torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous())]
    same += [(np.arange(6)[::2], np.array([0, 2, 4]))]
    for one, other in same:
        assert digest(one) == digest(other)


def test_devices_count_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    examinations = [Examination(torch.zeros(3)) for _ in range(3)]
    for examination, device in zip(examinations, ("cuda:0", "cuda:1", "cpu"), strict=True):
        examination.leaves[0] = type(examination.leaves[0])(
            **{name: getattr(examination.leaves[0], name) for name in examination.leaves[0].__struct_fields__}
            | {"device": device}
        )
    digests = [examination.examined(1).digest for examination in examinations]
    assert digests[0] == digests[1] != digests[2]


def test_circles_end() -> None:
    circle: list[Any] = [1]
    circle.append({"again": circle})
    assert leaves(circle)["[1]['again']"] == ("value", "the same object as the whole")


def test_what_cannot_be_compared_is_counted() -> None:
    assert Examination([threading.Lock(), 1, object()]).examined(1).unknown == 2


def test_a_part_that_fails_is_told_and_the_rest_compared() -> None:
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not this one")

    found = leaves({"good": 1, "bad": torch.zeros(2).as_subclass(Broken), "fine": 2})
    assert found["['bad']"] == ("error", "RuntimeError: not this one")
    assert found["['fine']"] == ("value", "2")


def test_too_many_parts_are_counted_not_looked_at() -> None:
    walked = leaves_of({str(number): number for number in range(MOST_LEAVES + 10)})
    assert len(walked.found) == MOST_LEAVES
    assert walked.left_out == 11


def test_a_huge_number_is_not_printed() -> None:
    assert leaves(10**100_000)[""] == ("value", "<an int of 332193 bits>")

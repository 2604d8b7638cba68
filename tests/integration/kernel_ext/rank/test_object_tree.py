"""Values of all kinds taken apart."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import random
import re
import threading
import types
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]  # has no types
import pytest
import torch

from hvdlab.kernel_ext.rank.compare import ComparedValue
from hvdlab.kernel_ext.rank.object_tree import MOST_LEAVES, leaves_of


def leaves(value: Any) -> dict[str, tuple[str, str]]:
    return {found.path: (found.kind, found.text) for found in leaves_of(value).found}


def digest(value: Any) -> bytes:
    return ComparedValue(value).examined(1).digest


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

    __iter__ = __len__ = __repr__ = items


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
    examinations = [ComparedValue(torch.zeros(3)) for _ in range(3)]
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
    assert ComparedValue([threading.Lock(), 1, object()]).examined(1).unknown == 2


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


def unlike(make: Callable[[int], Any]) -> None:
    """Check that values made for two ranks differ, or are reported as not compared; for one rank it is the same
    twice."""
    ours, theirs = ComparedValue(make(0)).examined(1), ComparedValue(make(1)).examined(1)
    assert ours.digest != theirs.digest or ours.unknown
    assert ComparedValue([make(0)]).examined(1).digest == ComparedValue([make(0)]).examined(1).digest


def function_with(default: int) -> Any:
    def function(x: int = default) -> int:
        return x

    return function


def closure_over(value: int) -> Any:
    return lambda: value


def class_with(value: int) -> type:
    return type("Settings", (), {"__module__": __name__, "rate": value})


def enumeration(value: int) -> Any:
    return enum.Enum("Mode", {"FAST": value}, module=__name__)


class Rate(float):
    unit = "Hz"

    def __init__(self, value: float) -> None:
        self.origin = ""


class Settings(dict[str, int]):
    def __init__(self, **items: int) -> None:
        super().__init__(**items)
        self.mode = 0


def with_attribute(value: Any, name: str, attribute: Any) -> Any:
    setattr(value, name, attribute)
    return value


def registered(names: str) -> torch.nn.Module:
    model = torch.nn.Module()
    for name in names:
        model.register_parameter(name, torch.nn.Parameter(torch.full((1,), float(ord(name)))))
    return model


def hooked(forward: bool) -> torch.nn.Module:
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    if forward:
        layer.register_forward_hook(lambda *_: None)
    return layer


def storage(value: int) -> torch.UntypedStorage:
    return torch.tensor([value], dtype=torch.uint8).untyped_storage()


def masked(mask: bool) -> Any:
    return np.ma.masked_array([1, 2], mask=[mask, False])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda r: pd.Timestamp(2020, 1, 1 + r),
        lambda r: pd.Timestamp(2020, 1, 1, tz=["UTC", "CET"][r]),
        lambda r: pd.Timestamp(2020, 1, 1).as_unit(("s", "ns")[r]),
        lambda r: pd.Timedelta(r, "s"),
        lambda r: pd.Period(f"202{r}-01"),
        lambda r: pd.Interval(0, 1 + r),
        lambda r: pd.Categorical(["a", "b"], categories=[["a", "b"], ["b", "a"]][r]),
        lambda r: pd.Series([1, 2], name=f"s{r}"),
        lambda r: pd.date_range("2020", periods=3, tz=["UTC", "CET"][r]),
        lambda r: pd.array([1, None, r]),
        lambda r: (
            pd.DataFrame({"a": [1], "b": [1]})[["ab", "ba"][r][0:1] + ""] if r else pd.DataFrame({"a": [1]})
        ),
        lambda r: torch.quantize_per_tensor(torch.ones(2), 0.1 * (1 + r), 0, torch.qint8),
        lambda r: masked(bool(r)),
        lambda r: functools.partial(max, r),
        lambda r: functools.partial(max, default=r),
        function_with,
        closure_over,
        class_with,
        lambda r: class_with(r)(),
        enumeration,
        lambda r: enumeration(r).FAST,
        lambda r: io.BytesIO(bytes([r])),
        lambda r: io.StringIO(str(r)),
        storage,
        lambda r: hooked(bool(r)),
        lambda r: registered(("ab", "ba")[r]),
        lambda r: torch.optim.SGD(registered(("ab", "ba")[r]).parameters(), lr=0.1),
        lambda r: collections.OrderedDict.fromkeys(("ab", "ba")[r]),
        lambda r: collections.deque([1], maxlen=r + 1),
        lambda r: collections.defaultdict((int, float)[r]),
        lambda r: array("i", [r]),
        lambda r: memoryview(bytes([r])),
        lambda r: types.MappingProxyType({"a": r}),
        lambda r: compile(f"x.{'ab'[r]}", "cell", "eval"),
        lambda r: (lambda x: x.a) if r else (lambda x: x.b),
        lambda r: [lambda: [i + 1 for i in ()], lambda: [i + 2 for i in ()]][r],  # type: ignore[var-annotated]  # mypy finds no type in ()
        lambda r: [1].append if r else [2].append,
        lambda r: ValueError(r),
        lambda r: re.compile("a" * 300 + str(r)),
        lambda r: with_attribute(Rate(1.0), "origin", r),
        lambda r: with_attribute(Settings(a=1), "mode", r),
        lambda r: with_attribute(torch.ones(1), "note", r),
        lambda r: with_attribute(torch.nn.Linear(1, 1, device="meta"), "_private", r),
        lambda r: {"x" * 200 + str(r): 1},
        lambda r: {frozenset({r}): 1},
        lambda r: {Rate(r)},
        lambda r: np.array([[None] * 2] * 3).reshape((2, 3) if r else (3, 2)),
        lambda r: np.zeros(1, [("ab"[r], "i4")])[0],
        lambda r: np.random.PCG64(r),
        lambda r: iter([r]),
        lambda r: (n for n in [r]),
        lambda r: property(function_with(r)),
        lambda r: functools.lru_cache(function_with(r)),
    ],
)
def test_what_differs_never_looks_as_if_it_agreed(make: Callable[[int], Any]) -> None:
    unlike(make)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_compiled_modules_are_compared() -> None:
    unlike(lambda r: torch.jit.script(torch.nn.Linear(1, 1 + r, device="meta")))
    unlike(lambda r: torch.jit.script(torch.nn.ReLU() if r else torch.nn.Tanh()))


def test_what_trains_is_compared_as_a_whole() -> None:
    """No object of every notebook may be of a kind that can't be compared: the report would always name it."""
    model = Net()
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model.fc(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)), batch_size=2)
    table = pd.DataFrame({"a": [1], "b": ["x"]}, index=pd.date_range("2026", periods=1))
    everything = {
        "model": model,
        "training": (optimizer, scheduler, loader),
        "table": table,
        "settings": [Slotted(), Colour.RED, Rate(1.0), np.float32(1), torch.float32, torch.device("cpu")],
        "dates": [pd.Timestamp(0), np.dtype("f4")],
        "functions": [len, function_with(1), Net.forward, model.forward],
        "layers": [torch.nn.LSTM(2, 2), torch.nn.MultiheadAttention(2, 1), torch.nn.CrossEntropyLoss()],
    }
    walked = leaves_of(everything)
    assert [
        (found.path, found.type, found.text) for found in walked.found if found.kind in ("opaque", "error")
    ] == []
    assert not walked.left_out

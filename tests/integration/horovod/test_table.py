"""``docs/reference/horovod.md`` agrees with the code, and a false row is found."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.data import AsyncDataLoaderMixin
from hvdlab.horovod.common.basics import HorovodBasics
from hvdlab.horovod.common.exceptions import HorovodVersionMismatchError
from support.page_scripts import load_script
from support.patience import PROGRAM_PATIENCE

SCRIPT = Path(__file__).parents[3] / "docs" / "reference" / "horovod" / "table.py"

table = load_script(SCRIPT, "horovod_table")


def test_the_table_is_what_the_code_says() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_row_has_a_verdict() -> None:
    rows = [line for line in table.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 350
    for row in rows:
        name, verdict, note = (cell.strip() for cell in row.strip("|").replace("\\|", "/").split("|"))
        assert verdict in (*table.VERDICTS, table.LATER), row
        assert note or verdict == "same", row
        assert name


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that stands for one of Horovod's."""

    class Base:
        @staticmethod
        def still(a: int) -> None: ...

        def moves(self, a: int, b: int = 1) -> None: ...

        @property
        def shown(self) -> int:
            return 1

    class Own(Base):
        shared = 1
        declared: int

        def __init__(self, a: int) -> None:
            self.a = a
            a.other = 1  # type: ignore[attr-defined]

    def makes() -> Own:
        raise NotImplementedError

    def makes_either() -> Own | Base:
        raise NotImplementedError

    for function in (makes, makes_either):
        function.__annotations__ = {"return": Own if function is makes else Own | Base}

    def two(a: int, b: int = 1, c: tuple[int, ...] = ()) -> None: ...

    found = ModuleType("standing_in")
    found.__dict__.update(
        Base=Base, Own=Own, two=two, makes=makes, makes_either=makes_either, value=60, inner=SimpleNamespace()
    )
    Own.__module__ = Base.__module__ = found.__name__
    found.__file__ = __file__  # where the source of its classes is
    monkeypatch.setitem(sys.modules, "standing_in", found)
    return found


SEEN = [
    ("two", "(a, b=1, c=())", "same"),
    ("two", "(a, b=1)", "extended"),
    ("two", "(a)", "extended"),
    ("two", "(a, b, c=())", "extended"),
    ("two", "(*args, **kwargs)", "same"),
    ("two", "(b, a=1, c=())", "different"),
    ("two", "(a, b=2, c=())", "different"),
    ("two", "(a, b=True, c=())", "different"),
    ("two", "(a, b=1, c=(), d=None)", "different"),
    ("two", "(a, b=1, **kwargs)", "different"),
    ("two", "(b=1)", "different"),
    ("gone", "(a)", "absent"),
    ("Base.gone", "(a)", "absent"),
    ("value", "= 60", "same"),
    ("value", "= 61", "different"),
    ("value", "= os.path.join()", "same"),
    ("value", "(a)", "different"),
    ("value", "module", "absent"),
    ("Base", "class(object)", "same"),
    ("Own", "class(some.Base) (a)", "same"),
    ("Own", "class(Other) (a)", "different"),
    ("Own", "class(Base) (a, b)", "different"),
    ("Own", "class(Base) (b)", "different"),
    ("two", "class(object)", "different"),
    ("Base.still", "static (a)", "same"),
    ("Base.moves", "static (a, b=1)", "different"),
    ("Base.moves", "(a, b=1)", "same"),
    ("Base.moves", "(self, a, b=1)", "different"),
    ("Base.shown", "property", "same"),
    ("Base.moves", "property", "different"),
    ("Own.a", "attribute", "same"),
    ("Own.shared", "attribute", "same"),
    ("Own.declared", "attribute", "same"),
    ("Own.shown", "attribute", "same"),
    ("Own.other", "attribute", "absent"),
    ("Own.moves", "attribute", "different"),
    ("Own.still", "attribute", "different"),
    ("inner.gone", "attribute", "absent"),
    ("makes().a", "attribute", "same"),
    ("makes().moves", "(a, b=1)", "same"),
    ("makes().moves", "(b)", "different"),
    ("makes_either().a", "attribute", "absent"),
    ("makes_either().shown", "attribute", "same"),
    ("gone().a", "attribute", "absent"),
]


@pytest.mark.parametrize(("name", "described", "verdict"), SEEN)
def test_what_a_look_at_the_code_says(module: ModuleType, name: str, described: str, verdict: str) -> None:
    assert table.look("standing_in", name, described).verdict == verdict


def _sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


def _handler(kind: str, value: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: [getattr(hvd.elastic.state, kind)(value())]


MAKERS: dict[str, Callable[[], list[Any]]] = {
    "AsyncDataLoaderMixin": lambda: [AsyncDataLoaderMixin()],
    "Compression": lambda: [hvd.Compression],
    "DistributedOptimizer()": lambda: [
        hvd.DistributedOptimizer(_sgd(), op=op) for op in (hvd.Average, hvd.Adasum)
    ],
    "ElasticSampler": lambda: [hvd.elastic.ElasticSampler([1, 2])],
    "HorovodBasics": lambda: [HorovodBasics(__file__)],
    "HorovodVersionMismatchError": lambda: [HorovodVersionMismatchError("torch", "2", "1")],
    "HostsUpdatedInterrupt": lambda: [hvd.elastic.HostsUpdatedInterrupt(True)],
    "ModelStateHandler": _handler("ModelStateHandler", lambda: torch.nn.Linear(1, 1)),
    "OptimizerStateHandler": _handler("OptimizerStateHandler", _sgd),
    "ProcessSet": lambda: [hvd.ProcessSet([0]), hvd.global_process_set],
    "SamplerStateHandler": _handler("SamplerStateHandler", lambda: hvd.elastic.ElasticSampler([1])),
    "StateHandler": _handler("StateHandler", lambda: 1),
    "SyncBatchNorm": lambda: [hvd.SyncBatchNorm(3), hvd.SyncBatchNorm(3, affine=False)],
    "TorchState": lambda: [
        hvd.elastic.TorchState(), hvd.elastic.TorchState(torch.nn.Linear(1, 1), _sgd(), epoch=1)
    ],
}  # fmt: skip


def test_attributes_are_there_in_objects(world_of_one: None) -> None:
    api = tomllib.loads((table.HERE / "api.toml").read_text())["names"]
    rows = {name for names in api.values() for name, described in names.items() if described == "attribute"}
    absent = {
        name.strip("`")
        for line in table.PAGE.read_text().splitlines()
        if line.startswith("| `")
        for name, verdict in [[cell.strip() for cell in line.split("|")[1:3]]]
        if verdict == "absent"
    }
    assert len(rows) > 50
    for name in sorted(rows - absent):
        owner, _, attribute = name.rpartition(".")
        for made in MAKERS[owner]():
            assert hasattr(made, attribute), name
    for name in sorted(rows & absent):
        owner, _, attribute = name.rpartition(".")
        assert not any(hasattr(made, attribute) for made in MAKERS[owner]()), name


def test_what_is_seen_and_what_is_declared_must_agree() -> None:
    seen = {verdict: table.Seen(verdict, "so") for verdict in table.VERDICTS}
    assert table.judge("x", seen["same"], None) == table.Row("x", "same")
    assert table.judge("x", seen["extended"], None) == table.Row("x", "extended", "so")
    assert table.judge("x", seen["same"], "different: how") == table.Row("x", "different", "how")
    assert table.judge("x", seen["extended"], "extended: more") == table.Row("x", "extended", "more; so")
    assert table.judge("x", seen["absent"], "absent: why") == table.Row("x", "absent", "why")
    wrong = [
        ("different", None), ("absent", None), ("same", "absent: why"), ("absent", "different: how"),
        ("different", "extended: more"), ("same", "same: really"), ("same", "different:"), ("same", "fine: x"),
    ]  # fmt: skip
    for verdict, declared in wrong:
        with pytest.raises(table.Stale, match="x"):
            table.judge("x", seen[verdict], declared)


def test_declarations_that_fit_nothing_are_noticed() -> None:
    verdicts = table.Verdicts({"a.*": "1", "a.b.*": "2", "a.b.c": "3", "z": "4"})
    assert [verdicts.of(name) for name in ("a.b.c", "a.b.d", "a.x", "b")] == ["3", "2", "1", None]
    assert verdicts.unused() == ["z"]

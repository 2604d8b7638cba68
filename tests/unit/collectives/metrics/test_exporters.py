"""The exporters: a real file, and trackers that are made up, so that none has to be installed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.exporters import JsonLines, MLflow, Point, TensorBoard, WandB

POINTS = [
    Point(0, "loss", 0.5, 10, 1_000.25),
    Point(1, "loss", 0.75, 10, 1_000.5),
    Point(1, "hvdlab/cpu", 99.0, None, 1_001.0),
    Point(1, "hvdlab/cpu", 98.0, None, 1_002.0),
]


# -- a file -------------------------------------------------------------------------------------------------------


def test_lines_of_json_say_it_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    exporter = JsonLines(path)
    exporter.write(POINTS[:1])
    exporter.write([Point(2, "größe", math.nan, None, 0.0)])
    exporter.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"time": 1000.25, "rank": 0, "name": "loss", "value": 0.5, "step": 10},
        {"time": 0.0, "rank": 2, "name": "größe", "value": None, "step": None},
    ]


def test_a_file_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        exporter = JsonLines(path)
        exporter.write(POINTS)
        exporter.close()
    assert len(path.read_text().splitlines()) == 8


def test_a_file_that_can_not_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "missing" / "metrics.jsonl")


# -- TensorBoard --------------------------------------------------------------------------------------------------


class Writer:
    """Writer that records a ``SummaryWriter``'s calls."""

    def __init__(self, directory: str) -> None:
        self.directory, self.scalars, self.flushes, self.closes = directory, [], 0, 0  # type: ignore[var-annotated]
        writers[directory] = self

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
        self.scalars.append((tag, value, step, walltime))

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.closes += 1


writers: dict[str, Writer] = {}


def test_each_rank_is_a_run_of_tensorboard() -> None:
    writers.clear()
    exporter = TensorBoard("runs/one", Writer)
    exporter.write(POINTS)
    exporter.close()
    assert {directory: writer.scalars for directory, writer in writers.items()} == {
        "runs/one/rank0": [("loss", 0.5, 10, 1000.25)],
        "runs/one/rank1": [("loss", 0.75, 10, 1000.5), ("hvdlab/cpu", 99.0, 0, 1001.0), ("hvdlab/cpu", 98.0, 1, 1002.0)],
    }  # fmt: skip
    assert all((writer.flushes, writer.closes) == (1, 1) for writer in writers.values())


@pytest.mark.parametrize("name", ["torch.utils.tensorboard", "tensorboardX"])
def test_either_writer_of_event_files_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    writers.clear()
    module = ModuleType(name)
    module.SummaryWriter = Writer  # type: ignore[attr-defined]  # made up
    for one in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, one, module if one == name else None)
    TensorBoard("runs").write(POINTS[:1])
    assert list(writers) == ["runs/rank0"]


def test_without_either_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, one, None)
    with pytest.raises(ModuleNotFoundError, match="tensorboard"):
        TensorBoard("runs")


# -- MLflow -------------------------------------------------------------------------------------------------------


class Client:
    def __init__(self) -> None:
        self.logged: list[tuple[str, list[Any]]] = []

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.logged.append((run_id, [tuple(vars(one).values()) for one in metrics]))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a module that stands in for mlflow, without an active run."""
    module: SimpleNamespace = SimpleNamespace(
        active=None,
        client=Client(),
        active_run=lambda: module.active,
        start_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="new")),
        MlflowClient=lambda: module.client,
    )
    entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: SimpleNamespace(k=key, v=value, t=timestamp, s=step)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return module


def test_mlflow_gets_a_batch_per_write(mlflow: SimpleNamespace) -> None:
    mlflow.active = SimpleNamespace(info=SimpleNamespace(run_id="active"))
    MLflow().write(POINTS)
    assert mlflow.client.logged == [
        (
            "active",
            [
                ("loss/rank0", 0.5, 1_000_250, 10),
                ("loss/rank1", 0.75, 1_000_500, 10),
                ("hvdlab/cpu/rank1", 99.0, 1_001_000, 0),
                ("hvdlab/cpu/rank1", 98.0, 1_002_000, 0),
            ],
        )
    ]


def test_mlflows_names_are_kept_to_what_it_takes(mlflow: SimpleNamespace) -> None:
    exporter = MLflow("given", key="{name}")
    exporter.write([Point(0, "loss (train) [%]", 1.0, 0, 0.0)])
    assert mlflow.client.logged == [("given", [("loss _train_ ___", 1.0, 0, 0)])]


def test_without_a_run_of_mlflow_one_is_begun(mlflow: SimpleNamespace) -> None:
    assert MLflow().run_id == "new"


# -- Weights & Biases ---------------------------------------------------------------------------------------------


class Run:
    def __init__(self) -> None:
        self.defined: dict[str, str] = {}
        self.rows: list[dict[str, float]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        assert name not in self.defined
        self.defined[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


def test_weights_and_biases_gets_a_row_per_step() -> None:
    run = Run()
    exporter = WandB(run)
    exporter.write(POINTS)
    exporter.write([Point(0, "loss", 0.25, 11, 1_003.0)])
    assert run.rows == [
        {"hvdlab/step": 10, "loss/rank0": 0.5, "loss/rank1": 0.75},
        {"hvdlab/time": 1001.0, "hvdlab/cpu/rank1": 99.0},
        {"hvdlab/time": 1002.0, "hvdlab/cpu/rank1": 98.0},
        {"hvdlab/step": 11, "loss/rank0": 0.25},
    ]
    assert run.defined == {
        "loss/rank0": "hvdlab/step",
        "loss/rank1": "hvdlab/step",
        "hvdlab/cpu/rank1": "hvdlab/time",
    }


def test_two_values_of_one_step_are_two_rows() -> None:
    run = Run()
    WandB(run, key="{name}").write([Point(0, "loss", value, 10, 0.0) for value in (1.0, 2.0)])
    assert run.rows == [{"hvdlab/step": 10, "loss": 1.0}, {"hvdlab/step": 10, "loss": 2.0}]


def test_the_active_run_is_taken_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(InvalidRequestError, match=r"wandb\.init\(\)"):
        WandB()
    module.run = Run()
    WandB().write(POINTS[:1])
    assert len(module.run.rows) == 1


@pytest.mark.parametrize("key", ["{loss}", "{0}", "{name", "{name.x}"])
def test_keys_have_two_fields_only(key: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"may have \{name\} and \{rank\}"):
        WandB(Run(), key=key)


def test_each_says_where_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow: SimpleNamespace
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = JsonLines("metrics.jsonl")
    lines.close()
    run = Run()
    run.id = "w1"  # type: ignore[attr-defined]  # made up
    assert lines.target == str(tmp_path / "metrics.jsonl")
    assert TensorBoard("runs", Writer).target == str(tmp_path / "runs")
    assert MLflow("m1").target == "m1"
    assert WandB(run).target == "w1"

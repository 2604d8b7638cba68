"""Lightning's estimator: plain modules and LightningModules of both packages, on two ranks and on one in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.spark.parquet import InThisProcess, NotToBeUsed, read, write
from hvdlab.spark.common.backend import LocalBackend
from hvdlab.spark.common.store import LocalStore

pytest.importorskip("lightning")

import lightning.pytorch as pl  # type: ignore[import-not-found]  # the tests skip without it
import pytorch_lightning  # type: ignore[import-not-found]  # comes with it

from hvdlab.spark.lightning import LightningEstimator, TorchEstimator, TorchModel

# Lightning uses functions that numpy, torch and Python deprecate.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def mean_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


def module_of(package: Any, rate: float = 0.1, clip: bool = False) -> Any:
    torch.manual_seed(0)

    class Regression(package.LightningModule):  # type: ignore[misc]  # the package has no types here
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x)
            return found

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self(batch["x"]), batch["y"][:, None])
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=len(batch["y"]))
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            loss = torch.nn.functional.mse_loss(self(batch["x"]), batch["y"][:, None])
            self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["y"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=rate)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Regression()


def estimator(store: LocalStore, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "backend": InThisProcess(),
        "store": store,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
    }
    return TorchEstimator(**{**settings, **more})


def chosen(start: int) -> list[int]:
    """Return the rows of both ranks' batches."""
    return [*range(start, start + 8), *range(32 + start, 40 + start)]


def test_two_ranks_clip_what_is_reduced_and_go_on_with_the_schedule(tmp_path: Path) -> None:
    store = write(tmp_path)
    write(tmp_path, 32, "intermediate_val_data")
    limit = 0.5
    made = estimator(
        store,
        model=module_of(pl),
        backend=LocalBackend(2),
        run_id="r",
        trainer_args={"gradient_clip_val": limit},
    )
    model = made.fit_on_parquet()

    x, y = map(torch.from_numpy, read(tmp_path))
    reference = module_of(pl)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)

    def one_epoch() -> None:
        for start in range(0, 32, 8):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(reference(x[chosen(start)]), y[chosen(start)]).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
            optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2

    one_epoch()
    one_epoch()
    torch.testing.assert_close(model.getModel().linear.weight, reference.linear.weight)
    torch.testing.assert_close(made.getModel().linear.weight, module_of(pl).linear.weight)
    first, second = model.getHistory()
    assert (first["epoch"], second["epoch"]) == (0, 1)
    assert second["train"]["loss"] < first["train"]["loss"]
    x, y = map(torch.from_numpy, read(tmp_path, "intermediate_val_data"))
    expected = torch.nn.functional.mse_loss(reference(x), y).item()
    assert second["validation"] == {"val_loss": pytest.approx(expected, rel=1e-4)}
    lines = (tmp_path / "runs" / "r" / "logs" / "metrics.csv").read_text().splitlines()
    assert "val_loss" in lines[0]

    # One rank goes on where two were, with the schedule's rate.
    further = made.setBackend(InThisProcess()).setEpochs(3).fit_on_parquet()
    assert [each["epoch"] for each in further.getHistory()] == [0, 1, 2]
    assert further.getHistory()[1] == second
    moved = (further.getModel().linear.weight - model.getModel().linear.weight).norm()
    assert 0 < float(moved) <= 0.1 / 4 * 8 * limit * 1.001


def scalars(store: LocalStore, run_id: str, name: str) -> dict[int, float]:
    """Return the scalars that TensorBoard's own reader finds in the run's logs in the store: step to value."""
    # The test skips without it.
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-not-found]
        EventAccumulator,
    )

    logs = store.get_logs_path(run_id)
    assert logs is not None
    events = EventAccumulator(store.get_localized_path(logs))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_tensorboards_files_are_in_the_store_from_each_epoch_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    store = write(tmp_path)
    write(tmp_path, 32, "intermediate_val_data")
    seen: list[int] = []

    class Look(pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch:
                seen.extend(scalars(store, "r", "val_loss"))

    made = estimator(store, model=module_of(pl), backend=InThisProcess(), run_id="r", callbacks=[Look()])
    model = made.fit_on_parquet()
    steps = 64 // 8
    assert seen == [steps - 1]
    for name, part in (("loss", "train"), ("val_loss", "validation")):
        found = scalars(store, "r", name)
        assert list(found) == [steps - 1, 2 * steps - 1]
        assert list(found.values()) == pytest.approx([epoch[part][name] for epoch in model.getHistory()])
    # A run that is continued adds to them.
    made.setEpochs(3).setCallbacks([]).fit_on_parquet()
    assert len(scalars(store, "r", "loss")) == 3
    lines = (tmp_path / "runs" / "r" / "logs" / "metrics.csv").read_text().splitlines()
    assert lines[0].split(",")[:2] == ["epoch", "loss"]


def test_a_plain_module_is_wrapped(tmp_path: Path) -> None:
    store = write(tmp_path, w=[1.0] * 32 + [0.0] * 32)
    write(tmp_path, 16, "intermediate_val_data", w=[1.0] * 16)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    reference = torch.nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    made = estimator(
        store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=torch.nn.MSELoss(),
        metrics=[mean_error],
        sample_weight_col="w",
        backward_passes_per_step=2,
        epochs=1,
    )
    trained = made.fit_on_parquet()
    x, y = map(torch.from_numpy, read(tmp_path))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    for start in range(0, 64, 16):
        weights = (torch.arange(start, start + 16) < 32).float()[:, None]
        optimizer.zero_grad()
        (weights * (reference(x[start : start + 16]) - y[start : start + 16]) ** 2).mean().backward()
        optimizer.step()
    torch.testing.assert_close(trained.getModel().weight, reference.weight)
    (epoch,) = trained.getHistory()
    assert set(epoch["train"]) == {"train_loss", "train_mean_error"}
    assert set(epoch["validation"]) == {"val_loss", "val_mean_error"}
    buffers = [state["momentum_buffer"] for state in trained.getOptimizer().state_dict()["state"].values()]
    assert len(buffers) == 2


def test_the_other_package_callbacks_and_a_loss_that_is_no_number(tmp_path: Path) -> None:
    store = write(tmp_path)
    seen = []

    class Seen(pytorch_lightning.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append((trainer.current_epoch, trainer.world_size, trainer.is_global_zero))

    estimator(store, model=module_of(pytorch_lightning), callbacks=[Seen()]).fit_on_parquet()
    assert seen == [(0, 1, True), (1, 1, True)]
    with pytest.raises(ValueError, match=r"The loss of batch \d+ of epoch \d+ is (inf|nan)"):
        estimator(store, model=module_of(pl, rate=1e30), terminate_on_nan=True).fit_on_parquet()


def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path) -> None:
    store = write(tmp_path)
    plain = torch.nn.Linear(3, 1)
    for more, words in (
        ({"model": plain}, "Optimizer parameter is required"),
        (
            {"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), lr=1)},
            "one of loss and loss_constructors",
        ),
        ({"model": module_of(pl), "train_minibatch_fn": print}, "write training_step"),
        ({"model": module_of(pl), "feature_cols": ["nothing"]}, r"Columns \['nothing'\]"),
        ({"model": module_of(pl), "input_shapes": [[-1, 4]]}, "has 3 values in a row"),
    ):
        with pytest.raises(ValueError, match=words):
            estimator(**{"backend": NotToBeUsed(), "store": store, **more}).fit_on_parquet()
    made = LightningEstimator()
    assert made.setLogEveryNSteps(3).getLogEveryNSteps() == 3
    assert made.setTrainerArgs({"a": 1}).getTrainerArgs() == {"a": 1}
    assert (made.getNumGpus(), made.getTerminateOnNan(), made.getDataModule()) == (None, False, None)


def test_predictions_and_back_from_disk(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    x = np.random.default_rng(0).normal(size=(20, 3))
    rows = [([float(value) for value in each], float(each.sum())) for each in x]
    frame = session.createDataFrame(rows, "x array<double>, y double").coalesce(1)
    made = estimator(LocalStore(str(tmp_path / "store")), model=module_of(pl), partitions_per_process=1)
    trained = made.fit(frame)
    trained.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    weight, bias = (each.detach().double().numpy() for each in trained.getModel().parameters())
    for row in loaded.transform(frame).collect():
        assert row["y__output"] == pytest.approx(float(np.array(row["x"]) @ weight[0] + bias[0]), abs=1e-4)
    made.save(str(tmp_path / "estimator"))
    again = TorchEstimator.load(str(tmp_path / "estimator"))
    torch.testing.assert_close(again.getModel().linear.weight, made.getModel().linear.weight)

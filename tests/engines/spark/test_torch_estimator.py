"""TorchEstimator on two ranks: on Parquet without Spark's tasks where that is enough, and once all the way from a data frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from engines.spark.parquet import WEIGHTS, NotToBeUsed, write
from hvdlab.runner.run_function import RankFailedError
from hvdlab.spark.common.backend import LocalBackend
from hvdlab.spark.common.store import LocalStore
from hvdlab.spark.torch import TorchEstimator, TorchModel


def estimator(store: LocalStore, **more: Any) -> TorchEstimator:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    settings: dict[str, Any] = {
        "backend": LocalBackend(2),
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "verbose": 0,
    }
    return TorchEstimator(**{**settings, **more})


def mean_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


def test_setters_and_getters(tmp_path: Path) -> None:
    made = estimator(LocalStore(str(tmp_path)))
    assert (made.getBatchSize(), made.getShuffle(), made.getPartitionsPerProcess()) == (8, True, 10)
    assert made.setEpochs(5) is made
    assert made.getEpochs() == 5
    assert made.setInMemoryCacheAll(True).getInmemoryCacheAll() is True
    assert made.setTrainReaderNumWorker(3).getTrainReaderNumWorkers() == 3
    assert made.copy({made.epochs: 7}).getEpochs() == 7
    assert made.getEpochs() == 5
    with pytest.raises(TypeError, match="no parameter 'epoch'"):
        TorchEstimator(epoch=1)
    model = TorchModel(label_columns=["y"])
    assert model.setLabelColoumns(["z"]).getLabelColumns() == ["z"]


def test_two_ranks_compute_what_one_loop_over_the_same_batches_does(tmp_path: Path) -> None:
    store = write(tmp_path)
    write(tmp_path, 21, "intermediate_val_data")
    made = estimator(store, shuffle=False, metrics=[mean_error], run_id="r", sample_weight_col=None)
    model = made.fit_on_parquet()

    table = pq.read_table(tmp_path / "intermediate_train_data")
    x = torch.tensor(table.column("x").to_pylist())
    y = torch.tensor(table.column("y").to_pylist(), dtype=torch.float32)[:, None]
    alone = estimator(store)
    reference, optimizer = alone.getModel(), alone.getOptimizer()

    def one_epoch() -> None:
        for start in range(0, 32, 8):
            chosen = [*range(start, start + 8), *range(32 + start, 40 + start)]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(reference(x[chosen]), y[chosen]).backward()
            optimizer.step()

    one_epoch()
    one_epoch()
    torch.testing.assert_close(model.getModel().weight, reference.weight)
    assert model.getOptimizer().state_dict()["state"][0]["momentum_buffer"] is not None
    torch.testing.assert_close(
        made.getModel().weight, estimator(store).getModel().weight
    )  # the estimator's own stays

    first, second = model.getHistory()
    assert second["train"]["loss"] < first["train"]["loss"]
    val = pq.read_table(tmp_path / "intermediate_val_data")
    outputs = reference(torch.tensor(val.column("x").to_pylist())).detach()
    labels = torch.tensor(val.column("y").to_pylist(), dtype=torch.float32)[:, None]
    assert second["validation"]["loss"] == pytest.approx(
        float(torch.nn.functional.mse_loss(outputs, labels)), rel=1e-4
    )
    expected = float(mean_error(outputs, labels))
    assert second["validation"]["all_metrics"][0]["mean_error"] == pytest.approx(expected, rel=1e-4)

    # The run is continued, with the optimizer's state; once it is complete, by as many epochs again.
    further = made.setEpochs(3).fit_on_parquet()
    one_epoch()
    torch.testing.assert_close(further.getModel().weight, reference.weight)
    assert [each["epoch"] for each in further.getHistory()] == [0, 1, 2]
    assert len(made.setEpochs(1).fit_on_parquet().getHistory()) == 4


def test_weights_callbacks_own_minibatches_and_transformation(tmp_path: Path) -> None:
    heavy = [1.0] * 32 + [0.0] * 32
    store = write(tmp_path, w=heavy)
    epochs = tmp_path / "epochs"

    def note(epoch: int, logs: dict[str, Any]) -> None:
        with epochs.open("a") as file:
            file.write(f"{epoch} {sorted(logs)}\n")

    def poison(frame: Any) -> Any:
        """Check that rows of no weight are not seen in the gradients."""
        return frame.assign(y=frame.y.where(frame.w > 0, 1e6))

    model = estimator(
        store, sample_weight_col="w", callbacks=[note], transformation_fn=poison, backward_passes_per_step=2
    ).fit_on_parquet()
    assert float(model.getModel().weight.detach().abs().max()) < 10
    assert epochs.read_text() == "0 ['epoch', 'train']\n1 ['epoch', 'train']\n"

    def minibatch(
        model: Any,
        optimizer: Any,
        transform_outputs: Any,
        loss_fn: Any,
        inputs: Any,
        labels: Any,
        weights: Any,
    ) -> Any:
        outputs = model(*inputs)
        found, labels = transform_outputs(outputs, labels)
        return outputs, loss_fn(found, labels, weights)  # without a step

    made = estimator(store, train_minibatch_fn=minibatch, loss=None, loss_constructors=[torch.nn.MSELoss])
    torch.testing.assert_close(made.fit_on_parquet().getModel().weight, made.getModel().weight)


def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path) -> None:
    store = write(tmp_path, 5)
    file = tmp_path / "file"
    file.touch()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_proc": 2}, "exclude each other"),
        ({"feature_cols": ["nothing"]}, r"Columns \['nothing'\] are not in"),
        ({"input_shapes": [[-1, 4]]}, "has 3 values in a row"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"backend": NotToBeUsed(6)}, "5 rows to train on, for 6 ranks"),
        ({"store": LocalStore(str(file / "below"))}, "can't be written"),
        ({"loss_constructors": [torch.nn.MSELoss]}, "one of loss and loss_constructors"),
        ({"validation": 1.5}, "neither a share"),
    ]
    for more, words in cases:
        with pytest.raises(ValueError, match=words):
            estimator(**{"backend": NotToBeUsed(2), "store": store, **more}).fit_on_parquet()
    with pytest.raises(ValueError, match="Model parameter is required"):
        TorchEstimator(optimizer=1, loss=1).fit_on_parquet()


def test_a_rank_names_the_row_group_of_a_null(tmp_path: Path) -> None:
    store = write(tmp_path, z=[1.0] * 55 + [None] + [1.0] * 8)
    with pytest.raises(
        RankFailedError, match=r"Column 'z' has 1 nulls in row group 5 of part-0.parquet, the first in row 5"
    ):
        estimator(store, label_cols=["z"]).fit_on_parquet()


def test_from_a_data_frame_to_predictions_and_back_from_disk(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    x = np.random.default_rng(0).normal(size=(60, 3))
    rows = [(*map(float, each), float(each @ WEIGHTS), int(number % 4 == 0)) for number, each in enumerate(x)]
    frame = session.createDataFrame(rows, "a double, b double, c double, y double, v int").repartition(2)
    store = LocalStore(str(tmp_path / "store"))
    made = estimator(
        store,
        backend=None,
        num_proc=2,
        validation="v",
        epochs=5,
        batch_size=4,
        partitions_per_process=1,
        run_id="r",
    )
    stages = Pipeline(stages=[VectorAssembler(inputCols=["a", "b", "c"], outputCol="x"), made])
    fitted = stages.fit(frame)
    history = fitted.stages[1].getHistory()
    assert len(history) == 5
    assert history[4]["validation"]["loss"] < 0.1 * history[0]["train"]["loss"]
    assert store.get_parquet_dataset(store.get_val_data_path(_only(tmp_path))).count_rows() == 15

    fitted.write().overwrite().save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    assert loaded.stages[1].getRunId() == "r"
    found = loaded.transform(frame).collect()
    weight, bias = (each.detach().double().numpy() for each in fitted.stages[1].getModel().parameters())
    assert len(found) == 60
    for row in found:
        assert row["y__output"] == pytest.approx(float(weight[0] @ row["x"].toArray() + bias[0]), abs=1e-4)

    made.save(str(tmp_path / "estimator"))
    again = TorchEstimator.load(str(tmp_path / "estimator"))
    assert again.getOptimizer().param_groups[0]["params"][0] is again.getModel().weight
    wide = TorchModel(
        model=torch.nn.Linear(1, 3), feature_columns=["a"], label_columns=["y"], input_shapes=[[-1, 1]]
    )
    assert len(wide.setOutputCols(["p"]).transform(frame).first()["p"]) == 3
    with pytest.raises(ValueError, match=r"columns \['y'\] already"):
        wide.setOutputCols(["y"]).transform(frame)


def _only(tmp_path: Path) -> int:
    (found,) = (tmp_path / "store").glob("intermediate_train_data.*")
    return int(found.name.rpartition(".")[2])

"""KerasEstimator: on two ranks against a loop over the same batches, on one in this process, and from a data frame to predictions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.spark.parquet import InThisProcess, NotToBeUsed, read, write
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.backend import LocalBackend
from hvdlab.spark.common.store import LocalStore

keras = pytest.importorskip("keras")

from hvdlab.spark.keras import KerasEstimator, KerasModel  # it needs Keras

# Keras uses functions that numpy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def network() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def estimator(store: LocalStore, **more: Any) -> KerasEstimator:
    settings: dict[str, Any] = {
        "backend": InThisProcess(),
        "store": store,
        "model": network(),
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.5),
        "loss": "mse",
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "verbose": 0,
    }
    return KerasEstimator(**{**settings, **more})


def test_two_ranks_compute_what_one_loop_over_the_same_batches_does(tmp_path: Path) -> None:
    store = write(tmp_path)
    write(tmp_path, 21, "intermediate_val_data")
    made = estimator(store, backend=LocalBackend(2), shuffle=False, metrics=["mae"], run_id="r")
    before = made.getModel().get_weights()
    model = made.fit_on_parquet()

    x, y = read(tmp_path)
    reference = network()
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"], jit_compile=False)

    def one_epoch() -> None:
        for start in range(0, 32, 8):
            chosen = [*range(start, start + 8), *range(32 + start, 40 + start)]
            reference.train_on_batch(x[chosen], y[chosen])

    one_epoch()
    one_epoch()
    np.testing.assert_allclose(model.getModel().get_weights()[0], reference.get_weights()[0], rtol=1e-4)
    assert np.abs(model.getOptimizer().variables[-1]).sum() > 0  # momentum
    np.testing.assert_array_equal(made.getModel().get_weights()[0], before[0])  # the estimator's own stays

    history = model.getHistory()
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert history["loss"][1] < history["loss"][0]
    loss, error = reference.evaluate(*read(tmp_path, "intermediate_val_data"), verbose=0)
    assert history["val_loss"][1] == pytest.approx(loss, rel=1e-4)
    assert history["val_mae"][1] == pytest.approx(error, rel=1e-4)

    # The run is continued, with the optimizer's state; once it is complete, by as many epochs again.
    further = made.setBackend(InThisProcess()).setEpochs(3).fit_on_parquet()
    assert [len(values) for values in further.getHistory().values()] == [3] * 4
    assert further.getHistory()["loss"][:2] == history["loss"]
    assert int(further.getOptimizer().iterations) == 4 + 4 + 8
    assert len(made.setEpochs(1).fit_on_parquet().getHistory()["loss"]) == 4


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):  # type: ignore[misc,name-defined]  # for mypy keras is a variable
    """Is imported by no other process."""

    def call(self, values: Any) -> Any:
        return values * 2


def test_several_inputs_and_outputs_with_weights_and_own_classes(tmp_path: Path) -> None:
    rows = 64
    z = np.arange(rows, dtype=np.int64) % 3
    store = write(tmp_path, z=z, w=[1.0] * 32 + [0.0] * 32)
    first, second = keras.Input((3, 1), name="a"), keras.Input((1,), dtype="int32", name="b")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(3, 2)(second))
    both = keras.layers.Concatenate()([Doubled()(keras.layers.Flatten()(first)), embedded])
    model = keras.Model(
        [first, second], [keras.layers.Dense(1)(both), keras.layers.Dense(3, activation="softmax")(both)]
    )
    made = estimator(
        store,
        model=model,
        feature_cols=["x", "z"],
        label_cols=["y", "z"],
        loss=["mse", "sparse_categorical_crossentropy"],
        loss_weights=[0.0, 1.0],
        sample_weight_col="w",
        custom_objects={"Doubled": Doubled},
        gradient_compression=None,
        epochs=3,
    )
    before = [each.numpy() for each in model.weights]
    trained = made.fit_on_parquet()
    moved = [
        float(np.abs(new.numpy() - old).max())
        for new, old in zip(trained.getModel().weights, before, strict=True)
    ]
    names = [each.path for each in trained.getModel().weights]
    first_dense = [how for name, how in zip(names, moved, strict=True) if "dense" in name][:2]
    assert first_dense == [0.0, 0.0]  # of the label whose loss has no weight
    assert max(moved) > 0
    assert trained.getMetadata()["z"]["output_shape"] == (3,)


def test_callbacks_and_what_the_checkpoint_callback_keeps(tmp_path: Path) -> None:
    store = write(tmp_path)
    write(tmp_path, 21, "intermediate_val_data")
    # Each epoch is worse than the one before: the first is the best, and the second ends the training.
    import hvdlab.keras as hvd

    made = estimator(
        store,
        optimizer=keras.optimizers.SGD(10.0),
        epochs=5,
        run_id="r",
        callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=1)],
        checkpoint_callback=hvd.callbacks.BestModelCheckpoint("val_loss"),
    )
    trained = made.fit_on_parquet()
    losses = trained.getHistory()["val_loss"]
    assert len(losses) == 2
    assert losses[1] > losses[0]
    model = trained.getModel()
    found = model.evaluate(*read(tmp_path, "intermediate_val_data"), verbose=0)
    assert found == pytest.approx(losses[0], rel=1e-3)
    assert store.exists(f"{store.get_run_path('r')}/best.keras")


def test_a_compiled_models_optimizer_and_batches_that_are_added_up(tmp_path: Path) -> None:
    store = write(tmp_path, 40)
    model = network()
    model.compile(keras.optimizers.SGD(0.1))
    trained = estimator(
        store, model=model, optimizer=None, shuffle=False, backward_passes_per_step=2, epochs=1
    ).fit_on_parquet()
    x, y = read(tmp_path)
    reference = network()
    reference.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    # Five batches are rounded up to six; the sixth starts over with the rows.
    for chosen in (range(16), range(16, 32), [*range(32, 40), *range(8)]):
        reference.train_on_batch(x[list(chosen)], y[list(chosen)])
    np.testing.assert_allclose(trained.getModel().get_weights()[0], reference.get_weights()[0], rtol=1e-4)


def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path) -> None:
    store = write(tmp_path)
    for more, words in (
        ({"model": object()}, "no model of Keras"),
        ({"loss": None}, "Loss parameter is required"),
        ({"optimizer": None}, "Optimizer must be provided"),
        ({"feature_cols": ["x", "y"]}, r"1 inputs for the columns \['x', 'y'\]"),
        ({"feature_cols": ["y"], "label_cols": ["y"]}, "has 1 values in a row"),
        ({"label_shapes": [[-1, 2]]}, "label_shapes"),
        (
            {"checkpoint_callback": keras.callbacks.ModelCheckpoint("x.weights.h5", save_weights_only=True)},
            "keeps weights only",
        ),
        ({"num_proc": 2}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=words):
            estimator(**{"backend": NotToBeUsed(), "store": store, **more}).fit_on_parquet()
    with pytest.raises(ValueError, match="Model parameter is required"):
        KerasEstimator().fit_on_parquet()
    with pytest.raises(TypeError, match="KerasEstimator has no parameter 'input_shapes'"):
        KerasEstimator(input_shapes=[[1]])
    made = estimator(store, custom_objects={"a": 1}, backend_env={"A": "1"})
    assert made.getCustomObjects() == {"a": 1}
    assert made.setBackendEnv({}).getBackendEnv() == {}
    assert made.setCheckpointCallback(None).getCheckpointCallback() is None
    assert made.get_model_shapes() == ([[-1, 3]], [[-1, 1]])


def test_a_null_is_named(tmp_path: Path) -> None:
    store = write(tmp_path, z=[1.0] * 55 + [None] + [1.0] * 8)
    with pytest.raises(InvalidRequestError, match=r"Column 'z' has 1 nulls in row group 5 of part-0.parquet"):
        estimator(store, label_cols=["z"], shuffle=False).fit_on_parquet()


def test_from_a_data_frame_to_predictions_and_back_from_disk(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    x = np.random.default_rng(0).normal(size=(60, 3))
    rows = [(*map(float, each), float(each.sum()), int(number % 4 == 0)) for number, each in enumerate(x)]
    frame = session.createDataFrame(rows, "a double, b double, c double, y double, v int").coalesce(1)
    made = estimator(
        LocalStore(str(tmp_path / "store")), validation="v", epochs=5, batch_size=4, partitions_per_process=1
    )
    stages = Pipeline(stages=[VectorAssembler(inputCols=["a", "b", "c"], outputCol="x"), made])
    fitted = stages.fit(frame)
    history = fitted.stages[1].getHistory()
    assert history["val_loss"][4] < 0.1 * history["loss"][0]

    fitted.write().overwrite().save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    weight, bias = fitted.stages[1].getModel().get_weights()
    found = loaded.transform(frame).collect()
    assert len(found) == 60
    for row in found:
        assert row["y__output"] == pytest.approx(float(row["x"].toArray() @ weight[:, 0] + bias[0]), abs=1e-4)

    made.save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator"))
    np.testing.assert_array_equal(again.getModel().get_weights()[0], made.getModel().get_weights()[0])
    assert float(again.getOptimizer().momentum) == 0.5
    with pytest.raises(ValueError, match=r"columns \['y'\] already"):
        KerasModel(model=network(), feature_columns=["a"], label_columns=["y"], output_cols=["y"]).transform(
            frame
        )


def test_the_bytes_of_a_checkpoint_are_a_file_of_keras(tmp_path: Path) -> None:
    store = write(tmp_path)
    estimator(store, run_id="r", epochs=1).fit_on_parquet()
    (place,) = (tmp_path / "runs" / "r").iterdir()
    os.rename(place, tmp_path / "found.keras")
    assert keras.models.load_model(tmp_path / "found.keras").count_params() == 4


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_is_of_keras_2_is_refused_with_the_way_out(tmp_path: Path, what: str) -> None:
    old = pytest.importorskip("tf_keras")

    class Own(old.Model):  # type: ignore[misc,name-defined]
        pass

    of = {"model": Own(), "optimizer": old.optimizers.SGD(0.1)}
    with pytest.raises(
        InvalidRequestError, match=f"{what} is a (Own|SGD) of tf_keras, which is Keras 2.*hvdlab.spark.run"
    ):
        estimator(write(tmp_path), **{what: of[what]}).fit_on_parquet()

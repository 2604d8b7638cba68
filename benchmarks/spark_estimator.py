"""``TorchEstimator.fit`` on rows of Parquet compared with a plain loop over pyarrow: time of an epoch. One rank each,
in alternation.

    out/engines/bin/python benchmarks/spark_estimator.py

Both read the same files and train the same module in a process of their own; timed is the epoch, not the start of ranks or of Spark, which
``LocalBackend`` does without. The peer reads row groups ahead with Arrow's own threads and does not shuffle; the estimator shuffles.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch

from hvdlab.runner.run_function import run
from hvdlab.spark.common.backend import LocalBackend
from hvdlab.spark.common.store import LocalStore
from hvdlab.spark.torch import TorchEstimator

FEATURES = 16


def write(place: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    target = place / "intermediate_train_data"
    target.mkdir()
    for number, part in enumerate(np.array_split(random.normal(size=(rows, FEATURES)).astype(np.float32), 8)):
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(part.ravel(), FEATURES), "y": part.sum(1)})
        pq.write_table(table, target / f"part-{number}.parquet", row_group_size=5000)


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def plain(place: str, batch_size: int, epochs: int) -> list[float]:
    """Return seconds of each epoch of a loop without hvdlab."""
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = ds.dataset(f"{place}/intermediate_train_data")
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        for batch in dataset.to_batches(batch_size=batch_size):
            x = torch.from_numpy(batch["x"].flatten().to_numpy().reshape(-1, FEATURES).copy())
            y = torch.from_numpy(batch["y"].to_numpy().copy())[:, None]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


class Clock:
    """Callback; the first epoch has no beginning that it sees."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __call__(self, epoch: int, logs: dict[str, Any]) -> None:
        with open(self.place, "a") as file:
            file.write(f"{time.perf_counter()}\n")


def estimated(place: str, batch_size: int, epochs: int) -> list[float]:
    model = module()
    with tempfile.NamedTemporaryFile("r") as times:
        TorchEstimator(
            backend=LocalBackend(1),
            store=LocalStore(place),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=torch.nn.MSELoss(),
            feature_cols=["x"],
            label_cols=["y"],
            batch_size=batch_size,
            epochs=epochs + 1,
            callbacks=[Clock(times.name)],
            verbose=0,
        ).fit_on_parquet()
        ends = list(map(float, times.read().split()))
    return [after - before for before, after in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), options.rows)
        ours: list[float] = []
        peers: list[float] = []
        for _ in range(options.rounds):
            peers += run(plain, (place, options.batch_size, options.epochs + 1), num_proc=1)[0][1:]
            ours += estimated(place, options.batch_size, options.epochs)
    mine, other = statistics.median(ours), statistics.median(peers)
    print(
        f"{options.rows} rows, batches of {options.batch_size}: epoch {mine:.2f} s, plain loop {other:.2f} s, ratio {mine / other:.2f}"
    )


if __name__ == "__main__":
    main()

"""Handwritten digits with ``model.fit``, elastically: the training goes on when a rank is lost, and with it again when it comes back.

::

    hvdlab run -np 4 --min-np 1 python examples/keras_elastic.py
    hvdlab run -np 4 --min-np 1 python examples/keras_elastic.py --lose 2      # rank 2 kills itself once
    python examples/keras_elastic.py                                           # one process, the same script

The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdlab.keras as hvd


class LoseOnce(keras.callbacks.Callback):
    """Kills this process in the second epoch of the training, unless a file says that it has happened."""

    def __init__(self, state: Any, once: Path) -> None:
        super().__init__()
        self.state = state
        self.once = once

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.state.epoch == 1 and batch == 3 and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank; scaled by the number of ranks")
    parser.add_argument("--batches-per-commit", type=int, default=5)
    parser.add_argument(
        "--lose", type=int, default=None, metavar="RANK", help="kill this rank once, in epoch 1"
    )
    parser.add_argument("--once", type=Path, default=Path("lost"), help="file that says it has happened")
    args = parser.parse_args()

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0)
    # Every rank draws from all images, each in an order of its own, so that none is missed when a rank is.
    batches = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    batches = batches.repeat().shuffle(2 * len(train_x), seed=hvd.rank()).batch(args.batch_size)

    keras.utils.set_random_seed(1)  # the same first weights each time
    layers = keras.layers
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9))
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)

    # What it takes to go on from any commit, on any rank.
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    def other_ranks() -> None:
        """The learning rate follows the number of ranks."""
        model.optimizer.learning_rate.assign(args.lr * hvd.size())
        print(f"rank {hvd.rank()}: going on with {hvd.size()} ranks in epoch {state.epoch}", flush=True)

    state.register_reset_callbacks([other_ranks])

    @hvd.elastic.run
    def train(state: Any) -> None:
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, args.batches_per_commit),
        ]
        if hvd.rank() == args.lose:
            callbacks.append(LoseOnce(state, args.once))
        model.fit(
            batches,
            steps_per_epoch=len(train_x) // (args.batch_size * hvd.size()),
            epochs=args.epochs - state.epoch,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )

    train(state)
    _, accuracy = model.evaluate(test_x, test_y, verbose=0)
    print(f"rank {hvd.rank()}: accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()

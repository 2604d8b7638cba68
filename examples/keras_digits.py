"""Handwritten digits with ``model.fit`` on several ranks: warmed up, with checkpoints of rank 0.

::

    hvdlab run -np 4 python examples/keras_digits.py
    hvdlab run -np 4 python examples/keras_digits.py --fp16-allreduce --checkpoint out/digits.keras
    python examples/keras_digits.py                       # one process, the same script

The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdlab.keras as hvd


def digits() -> list[np.ndarray]:
    """Training images, test images, training labels, test labels: split alike on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.02, help="of one rank; scaled by the number of ranks")
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--checkpoint", help="file for the best model; rank 0 writes it")
    args = parser.parse_args()

    hvd.init()
    train_x, test_x, train_y, test_y = digits()
    # Equally many images on every rank, so that all take the same number of steps.
    mine = slice(hvd.rank(), len(train_x) // hvd.size() * hvd.size(), hvd.size())

    rate = args.lr * hvd.size()
    model = network()
    model.compile(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate, momentum=0.9),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=args.warmup_epochs),
    ]
    if args.checkpoint and hvd.rank() == 0:
        callbacks.append(
            keras.callbacks.ModelCheckpoint(args.checkpoint, monitor="val_accuracy", save_best_only=True)
        )
    model.fit(
        train_x[mine],
        train_y[mine],
        args.batch_size,
        args.epochs,
        validation_data=(test_x[hvd.rank() :: hvd.size()], test_y[hvd.rank() :: hvd.size()]),
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    _, accuracy = model.evaluate(test_x, test_y, verbose=0)  # of the same model on the same images: the same
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()

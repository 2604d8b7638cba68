"""Handwritten digits with a training loop of one's own: a gradient tape in a ``tf.function``.

::

    hvdlab run -np 4 python examples/tensorflow_digits.py
    hvdlab run -np 4 python examples/tensorflow_digits.py --checkpoint out/digits
    python examples/tensorflow_digits.py                  # one process, the same script

The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdlab.tensorflow as hvd


def network() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="of each rank")
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.001, help="of one rank; scaled by the number of ranks")
    parser.add_argument("--checkpoint", help="where rank 0 writes the trained model's checkpoint")
    args = parser.parse_args()

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    mine = slice(hvd.rank(), None, hvd.size())
    batches = tf.data.Dataset.from_tensor_slices((train_x[mine], train_y[mine]))
    batches = batches.shuffle(len(train_x), seed=hvd.rank()).repeat().batch(args.batch_size)

    model = network()
    optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size())
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    # All begin with the weights of rank 0.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    for number, (images, labels) in enumerate(batches.take(args.steps), 1):
        loss = step(images, labels)
        if number % 50 == 0:
            mean = hvd.allreduce(loss, name="loss")
            if hvd.rank() == 0:
                print(f"step {number}: loss {mean:.4f}")

    right = tf.reduce_sum(tf.cast(tf.argmax(model(test_x[mine]), 1) == test_y[mine], tf.int64))
    accuracy = int(hvd.allreduce(right, op=hvd.Sum, name="right")) / len(test_x)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.1%}")
        if args.checkpoint:
            tf.train.Checkpoint(model=model, optimizer=optimizer).save(args.checkpoint)


if __name__ == "__main__":
    main()

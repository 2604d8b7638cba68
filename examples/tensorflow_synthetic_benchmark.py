"""Images per second of a residual network on random data, on as many ranks as there are.

::

    hvdlab run -np 2 python examples/tensorflow_synthetic_benchmark.py
    hvdlab run -np 2 python examples/tensorflow_synthetic_benchmark.py --fp16-allreduce --num-iters 5
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import tensorflow as tf

import hvdlab.tensorflow as hvd


def residual_network(width: int, image_size: int) -> tf.keras.Model:
    """Twelve convolutions in three stages, each followed by a normalization; every second one has a way around it."""
    layers = tf.keras.layers
    inputs = x = tf.keras.Input((image_size, image_size, 3))
    for stage in range(3):
        for place in range(2):
            channels, stride = width << stage, 2 if place == 0 and stage else 1
            around = x
            if x.shape[-1] != channels:
                around = layers.Conv2D(channels, 1, stride, use_bias=False)(x)
            x = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
            x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x) + around)
    return tf.keras.Model(inputs, layers.Dense(100)(layers.GlobalAveragePooling2D()(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--num-warmup-batches", type=int, default=3)
    parser.add_argument("--num-batches-per-iter", type=int, default=5)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    model = residual_network(args.width, args.image_size)
    optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images = tf.random.uniform((args.batch_size, args.image_size, args.image_size, 3))
    labels = tf.random.uniform((args.batch_size,), 0, 100, tf.int64)
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def batch() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for _ in range(args.num_warmup_batches):
        batch()
    rates = []
    for number in range(args.num_iters):
        started = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            batch()
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - started))
        if hvd.rank() == 0:
            print(f"iteration {number + 1}: {rates[-1]:.1f} images/s per rank")

    # The rates of all ranks; the slowest decides, so they hardly differ.
    everybody = hvd.allgather(tf.constant(rates, tf.float64), name="rates").numpy()
    if hvd.rank() == 0:
        middle, spread = float(np.median(everybody)), statistics.pstdev(everybody.tolist())
        print(f"images/s per rank: median {middle:.1f}, standard deviation {spread:.1f}")
        print(f"images/s on {hvd.size()} ranks: {hvd.size() * middle:.1f}")


if __name__ == "__main__":
    main()

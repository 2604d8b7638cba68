"""Handwritten digits as scripts for TensorFlow 1 train: a graph, a hook and a ``MonitoredTrainingSession``.

::

    hvdlab run -np 4 python examples/tensorflow1_digits.py
    hvdlab run -np 4 python examples/tensorflow1_digits.py --checkpoints out/digits
    python examples/tensorflow1_digits.py                 # one process, the same script

All of it is in ``tf.compat.v1``. The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdlab.tensorflow as hvd

v1 = tf.compat.v1


def dense(inputs: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", (inputs.shape[1], units))
        bias = v1.get_variable("bias", (units,), initializer=v1.zeros_initializer())
        return tf.matmul(inputs, kernel) + bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of all ranks together")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.002, help="of one rank; scaled by the number of ranks")
    parser.add_argument("--checkpoints", help="a folder, where rank 0 writes them and all ranks begin anew")
    args = parser.parse_args()

    hvd.init()
    v1.disable_eager_execution()
    digits, classes = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (digits / 16.0).astype("float32"), classes, test_size=0.2, random_state=0, stratify=classes
    )
    mine = slice(hvd.rank(), None, hvd.size())
    batches = tf.data.Dataset.from_tensor_slices((train_x[mine], train_y[mine]))
    batches = batches.shuffle(len(train_x), seed=hvd.rank()).repeat().batch(args.batch_size)
    images, labels = v1.data.make_one_shot_iterator(batches).get_next()

    def network(images: tf.Tensor) -> tf.Tensor:
        with v1.variable_scope("network", reuse=v1.AUTO_REUSE):
            return dense(tf.nn.relu(dense(images, 64, "hidden")), 10, "digits")

    loss = v1.losses.sparse_softmax_cross_entropy(labels, network(images))
    right = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(network(test_x[mine]), 1), test_y[mine]), tf.int64))
    right_of_all = hvd.allreduce(right, op=hvd.Sum, name="right")

    optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(args.lr * hvd.size()))
    step = v1.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step)

    with tf.control_dependencies([train]):
        number_of_step = step.read_value()

    evaluation = v1.train.FinalOpsHook(right_of_all)
    hooks = [
        # All begin with the weights of rank 0: new ones, or those of its checkpoint.
        hvd.BroadcastGlobalVariablesHook(0),
        v1.train.StopAtStepHook(last_step=max(1, args.steps // hvd.size())),
        evaluation,
    ]
    # Only rank 0 writes: ranks would overwrite one another's checkpoints.
    folder = args.checkpoints if hvd.rank() == 0 else None
    with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
        while not session.should_stop():
            value, number = session.run((loss, number_of_step))
            if hvd.rank() == 0 and number % 50 == 0:
                print(f"step {number}: loss {value:.4f}")
    if hvd.rank() == 0:
        print(f"test accuracy {int(evaluation.final_ops_values) / len(test_x):.1%}")


if __name__ == "__main__":
    main()

"""Images per second of a residual network on random data, on as many ranks as there are.

::

    hvdlab run -np 2 python examples/torch_synthetic_benchmark.py
    hvdlab run -np 2 python examples/torch_synthetic_benchmark.py --fp16-allreduce --num-iters 5
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import hvdlab.torch as hvd


def residual_network(width: int) -> nn.Module:
    """Twelve convolutions in three stages, each followed by a normalization."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(3):
        for place in range(4):
            out = width << stage
            stride = 2 if place == 0 and stage else 1
            layers += [nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


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
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    model = residual_network(args.width)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01 * hvd.size()),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(100, (args.batch_size,))

    def batch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

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
    everybody = hvd.allgather(torch.tensor(rates, dtype=torch.float64), name="rates")
    if hvd.rank() == 0:
        middle, spread = everybody.median().item(), statistics.pstdev(everybody.tolist())
        print(f"images/s per rank: median {middle:.1f}, standard deviation {spread:.1f}")
        print(f"images/s on {hvd.size()} ranks: {hvd.size() * middle:.1f}")


if __name__ == "__main__":
    main()

"""Handwritten digits, elastically: the training goes on when a rank is lost, and with it again when it comes back.

::

    hvdlab run -np 4 --min-np 1 python examples/elastic_training.py
    hvdlab run -np 4 --min-np 1 python examples/elastic_training.py --lose 2      # rank 2 kills itself once
    python examples/elastic_training.py                                           # one process, the same script

In a pool, run the file in a cell: ``%run examples/elastic_training.py``. If a rank is lost meanwhile, ``%hvd_pool repair``
starts it again, and the same cell on that rank lets it take part in what the others are doing.

The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlab.torch as hvd


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    train, test = torch.utils.data.random_split(data, [1437, 360], torch.Generator().manual_seed(0))
    return TensorDataset(*data[train.indices]), TensorDataset(*data[test.indices])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_data, test_data = digits()
    sampler = hvd.elastic.ElasticSampler(train_data, shuffle=True)
    loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    # What it takes to go on from any commit, on any rank.
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    def other_ranks() -> None:
        """The learning rate follows the number of ranks."""
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()
        print(f"rank {hvd.rank()}: going on with {hvd.size()} ranks in epoch {state.epoch}", flush=True)

    state.register_reset_callbacks([other_ranks])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < args.epochs:
            for number, (images, labels) in enumerate(loader):
                if state.epoch == 1 and number == 3 and hvd.rank() == args.lose and not args.once.exists():
                    args.once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, args.batch_size)
                if (number + 1) % args.batches_per_commit == 0:
                    state.commit()
            if hvd.rank() == min(hvd.global_process_set.ranks):  # rank 0 may be gone
                print(
                    f"epoch {state.epoch}: accuracy {accuracy(model, test_data):.1%}, {hvd.size()} ranks",
                    flush=True,
                )
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    print(f"rank {hvd.rank()}: accuracy {accuracy(model, test_data):.1%}", flush=True)


if __name__ == "__main__":
    main()

"""Adasum beside averaging: no learning rate that has to be scaled by the number of ranks.

::

    hvdlab run -np 4 python examples/torch_adasum.py
    hvdlab run -np 4 python examples/torch_adasum.py --average

Adasum adds what the ranks agree on once and what they found independently of each other in full, so that the
learning rate of a single process stays right.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdlab.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--average", action="store_true", help="average gradients instead")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(numbers)
    split = 1437

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.lr),
        named_parameters=model.named_parameters(),
        op=hvd.Average if args.average else hvd.Adasum,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    batch = 16
    steps = split // (batch * hvd.size())
    for epoch in range(1, args.epochs + 1):
        order = torch.randperm(split, generator=torch.Generator().manual_seed(epoch))
        for rows in order[: steps * batch * hvd.size()].reshape(steps, hvd.size(), batch)[:, hvd.rank()]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images[split:]).argmax(1) == labels[split:]).float().mean().item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()

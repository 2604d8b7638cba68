"""Ranks with different amounts of data: who has finished joins, and the others go on without waiting for it.

::

    hvdlab run -np 3 python examples/torch_uneven_data.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdlab.torch as hvd


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(numbers)

    # Rank 0 gets the least, the last rank the most.
    shares = torch.arange(1, hvd.size() + 1)
    ends = (shares.cumsum(0) * len(images) // shares.sum()).tolist()
    mine = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    mine = mine[([0, *ends])[hvd.rank()] : ends[hvd.rank()]]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(1, 6):
        batches = mine.split(16)
        for rows in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        last = hvd.join()  # contributes zeros to the others' allreduces until all are here
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        counts = hvd.allgather(torch.tensor([len(batches)]), name="batches").tolist()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: batches {counts}, rank {last} came last, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()

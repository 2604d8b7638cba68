"""Two models at once: each half of the ranks trains one, and all of them vote together.

::

    hvdlab run -np 4 python examples/torch_process_sets.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdlab.torch as hvd


def main() -> None:
    halves = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
    hvd.init(process_sets=halves)
    if hvd.size() != 4:
        raise SystemExit("This example is for four ranks: hvdlab run -np 4 …")
    team = next(number for number, half in enumerate(halves) if half.included())
    ours = halves[team]
    torch.manual_seed(team)
    torch.set_num_threads(1)

    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(numbers)
    split = 1437
    model = nn.Sequential(nn.Linear(64, 32 if team else 96), nn.ReLU(), nn.Linear(32 if team else 96, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2),
        named_parameters=model.named_parameters(),
        process_set=ours,
    )
    for name, parameter in model.named_parameters():
        hvd.broadcast_(parameter.data, ours.ranks[0], name=f"start.{name}", process_set=ours)

    for epoch in range(8):
        order = torch.randperm(split, generator=torch.Generator().manual_seed(epoch))
        for rows in order[: split // 32 * 32].reshape(-1, 2, 16)[:, ours.rank()]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()

    with torch.no_grad():
        votes = F.softmax(model(images[split:]), 1)
    alone = (votes.argmax(1) == labels[split:]).float().mean().item()
    together = hvd.allreduce(votes, name="votes")  # over all four ranks
    both = (together.argmax(1) == labels[split:]).float().mean().item()
    if ours.rank() == 0:
        print(f"team {team}: test accuracy {alone:.1%} alone, {both:.1%} together")


if __name__ == "__main__":
    main()

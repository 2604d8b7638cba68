"""A batch that is too large for the memory of a rank: gradients of several small ones are added up before they are sent.

::

    hvdlab run -np 2 python examples/torch_gradient_accumulation.py

Gradients are also clipped, after they were reduced and before the step is taken.
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
    parser.add_argument("--passes", type=int, default=4, help="backward passes before each step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(numbers)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.passes,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    step_size = args.micro_batch * args.passes * hvd.size()
    steps = len(images) // step_size
    for epoch in range(1, args.epochs + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        mine = order[: steps * step_size].reshape(steps, args.passes, hvd.size(), args.micro_batch)[
            :, :, hvd.rank()
        ]
        for step in range(steps):
            optimizer.zero_grad()
            for rows in mine[step]:
                # Divided here, since the gradients of the passes are added up, not averaged.
                (F.cross_entropy(model(images[rows]), labels[rows]) / args.passes).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        with torch.no_grad():
            rows = mine.flatten()
            right = (model(images[rows]).argmax(1) == labels[rows]).double().mean()
        accuracy = hvd.allreduce(right, name="accuracy").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {steps} steps of {step_size} images, training accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()

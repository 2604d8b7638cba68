"""Handwritten digits on several ranks: the smallest complete training script.

::

    hvdlab run -np 4 python examples/torch_digits.py
    hvdlab run -np 4 python examples/torch_digits.py --fp16-allreduce
    python examples/torch_digits.py                       # one process, the same script

The data are scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlab.torch as hvd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1)))))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, split alike on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) for x in parts[:2])
    train_y, test_y = (torch.tensor(y) for y in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> torch.Tensor:
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


def test(model: nn.Module, loader: DataLoader) -> float:
    """Accuracy over all ranks; each has tested its share."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    sums = hvd.allreduce(torch.tensor([right, total]), op=hvd.Sum, name="accuracy")
    return float(sums[0] / sums[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.02, help="of one rank; scaled by the number of ranks")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)

    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_set, 64, sampler=range(hvd.rank(), len(test_set), hvd.size()))

    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.lr * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = hvd.allreduce(train(model, optimizer, train_loader), name="loss").item()
        accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()

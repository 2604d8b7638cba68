"""An ImageNet-style training loop in small: residual network, warm-up, schedule, checkpoints and going on from them.

::

    hvdlab run -np 2 python examples/torch_checkpoints.py --epochs 2
    hvdlab run -np 2 python examples/torch_checkpoints.py --epochs 4      # goes on at epoch 3

The images are scikit-learn's digits, blown up to 16 x 16 in three channels.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlab.torch as hvd


class Block(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def network() -> nn.Sequential:
    return nn.Sequential(
        Block(3, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = F.interpolate(x, scale_factor=2).expand(-1, 3, -1, -1)
    y = torch.tensor(labels)
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def rate(epoch: float, warmup: float, epochs: int) -> float:
    """Factor of the learning rate of one rank: up to the number of ranks during warm-up, then down along a cosine."""
    if epoch < warmup:
        return 1 + (hvd.size() - 1) * epoch / warmup
    return hvd.size() * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / max(1e-9, epochs - warmup)))


def newest(directory: Path) -> int:
    """The last epoch that was saved, as rank 0 sees the directory; 0 if none."""
    found = [int(path.stem.rpartition("-")[2]) for path in directory.glob("checkpoint-*.pt")]
    return hvd.broadcast_object(max(found, default=0), root_rank=0, name="resume_from")


class Mean:
    """A mean over all batches of all ranks."""

    def __init__(self, name: str) -> None:
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum, self.count = self.sum + value * count, self.count + count

    def value(self) -> float:
        both = hvd.allreduce(
            torch.tensor([self.sum, self.count], dtype=torch.float64), op=hvd.Sum, name=self.name
        )
        return float(both[0] / both[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank, sent at once")
    parser.add_argument(
        "--batches-per-allreduce", type=int, default=1, help="accumulated before gradients are sent"
    )
    parser.add_argument("--base-lr", type=float, default=0.0125, help="of one rank")
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    parser.add_argument(
        "--sync-batch-norm", action="store_true", help="statistics of the batches of all ranks"
    )
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    start = newest(args.checkpoints)

    train_set, test_set = data()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank())
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, 64, sampler=range(hvd.rank(), len(test_set), hvd.size()))

    model = network()
    if args.sync_batch_norm:
        for block in [module for module in model if isinstance(module, Block)]:
            block.norm1 = hvd.SyncBatchNorm(block.norm1.num_features)
            block.norm2 = hvd.SyncBatchNorm(block.norm2.num_features)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), args.base_lr, momentum=0.9, weight_decay=5e-5),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
    )
    # Only rank 0 reads the file; the broadcasts give everybody what it holds.
    if start and hvd.rank() == 0:
        saved = torch.load(args.checkpoints / f"checkpoint-{start}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(start, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        train_loss = Mean("train_loss")
        optimizer.zero_grad()
        for step, (images, labels) in enumerate(loader):
            factor = rate(epoch + step / len(loader), args.warmup_epochs, args.epochs)
            for group in optimizer.param_groups:
                group["lr"] = args.base_lr * args.batches_per_allreduce * factor
            loss = F.cross_entropy(model(images), labels)
            train_loss.update(loss.item(), len(labels))
            (loss / args.batches_per_allreduce).backward()
            if (step + 1) % args.batches_per_allreduce == 0:
                optimizer.step()
                optimizer.zero_grad()
            elif step + 1 == len(loader):
                optimizer.step()  # what is left of the epoch
                optimizer.zero_grad()

        model.eval()
        accuracy = Mean("accuracy")
        with torch.no_grad():
            for images, labels in test_loader:
                accuracy.update((model(images).argmax(1) == labels).float().mean().item(), len(labels))
        mean_loss, mean_accuracy = train_loss.value(), accuracy.value()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.4f}, test accuracy {mean_accuracy:.1%}")
            args.checkpoints.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoints / f"checkpoint-{epoch + 1}.pt")


if __name__ == "__main__":
    main()

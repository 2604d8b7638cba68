"""Train in the actors of a Ray cluster, as Horovod's Ray programs do. Without a cluster it makes one of this machine.

python examples/ray_executor.py --num-workers 2
python examples/ray_executor.py --min-workers 1 --max-workers 4     # elastic: ranks come and go with nodes
"""

import argparse

import ray
import torch

import hvdlab.torch as hvd
from hvdlab.ray import RayExecutor


class Trainer:
    """Lives in each worker, between calls as well."""

    def __init__(self, rate: float) -> None:
        hvd.init()
        torch.manual_seed(hvd.rank())
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=rate), named_parameters=self.model.named_parameters()
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def epoch(self, steps: int) -> float:
        """The mean loss of all ranks in the last step."""
        loss = torch.zeros(())
        for _ in range(steps):
            features = torch.randn(32, 8)
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(features)[:, 0], features.sum(1))
            loss.backward()
            self.optimizer.step()
        return float(hvd.allreduce(loss.detach(), name="loss"))


def train_elastically(steps: int) -> float:
    """The same while ranks come and go; what is committed stays."""
    trainer = Trainer(0.1)
    state = hvd.elastic.TorchState(trainer.model, trainer.optimizer, epoch=0, loss=0.0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < 3:
            state.loss = trainer.epoch(steps)
            state.epoch += 1
            state.commit()

    train(state)
    return state.loss


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--min-workers", type=int, help="makes the call elastic")
    parser.add_argument("--max-workers", type=int)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    if not ray.is_initialized():
        ray.init()
    settings = RayExecutor.create_settings(timeout_s=60)
    if asked.min_workers:
        executor = RayExecutor(settings, min_workers=asked.min_workers, max_workers=asked.max_workers)
        executor.start()
        losses = executor.run(train_elastically, [asked.steps])
    else:
        executor = RayExecutor(settings, num_workers=asked.num_workers)
        executor.start(Trainer, executable_args=[0.1])
        for _ in range(3):
            losses = executor.execute(lambda trainer: trainer.epoch(asked.steps))
    print(f"loss {losses[0]:.4f} on {len(losses)} ranks")
    executor.shutdown()


if __name__ == "__main__":
    main()

"""A strategy for Lightning's trainer, by which its ranks train together on hvdlab's collectives."""

from __future__ import annotations

import functools
from typing import Any

import torch

import hvdlab.torch as hvd


@functools.cache
def strategy_class(package: Any) -> type:
    """The strategy for one of Lightning's two packages.

    It is a strategy for a single device: each rank's trainer has its own, and learns of the others only by rank, size and reductions.
    """
    from_rank_zero = package.utilities.rank_zero.rank_zero_only

    class HvdlabStrategy(package.strategies.SingleDeviceStrategy):  # type: ignore[misc]
        """Reduces gradients over all ranks before an optimizer's step, and what is logged with ``sync_dist=True``.

        Args:
            device: This rank's device.
            compression: Of the gradients.
            passes_per_step: Batches for each step of an optimizer, as the trainer accumulates them.
        """

        strategy_name = "hvdlab"
        optimizers: list[Any]

        def __init__(self, device: torch.device, compression: Any = None, passes_per_step: int = 1) -> None:
            super().__init__(device)
            self.global_rank, self.local_rank, self.world_size = hvd.rank(), hvd.local_rank(), hvd.size()
            self._compression, self._passes = compression or hvd.Compression.none, passes_per_step
            from_rank_zero.rank = hvd.rank()

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)

        def setup_optimizers(self, trainer: Any) -> None:
            super().setup_optimizers(trainer)
            names = list(self.lightning_module.named_parameters())
            self.optimizers = [
                hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=names,
                    compression=self._compression,
                    backward_passes_per_step=self._passes,
                )
                for optimizer in self.optimizers
            ]

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            def reduced() -> Any:
                # Here and not in the optimizer's step: the trainer clips gradients between the two.
                loss = closure()
                optimizer.synchronize()
                return loss

            with optimizer.skip_synchronize():
                return super().optimizer_step(optimizer, reduced, model, **kwargs)

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            values = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)
            word = str(reduce_op or "mean").lower().rpartition(".")[2]
            operations = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum}
            operations |= {"min": hvd.Min, "max": hvd.Max}
            if word not in operations:
                raise ValueError(f"reduce_op={reduce_op!r}: it is mean, sum, min or max.")
            if word == "mean" and not values.is_floating_point():
                values = values.double()
            return hvd.allreduce(values, op=operations[word])

        def all_gather(
            self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
        ) -> torch.Tensor:
            gathered: torch.Tensor = hvd.allgather(tensor[None])
            return gathered

        def barrier(self, name: str | None = None) -> None:
            hvd.barrier()

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return hvd.broadcast_object(obj, src)

        @property
        def is_distributed(self) -> bool:
            # Without this the trainer ignores `sync_dist`.
            return bool(self.world_size > 1)

        @property
        def is_global_zero(self) -> bool:
            return bool(self.global_rank == 0)

    return HvdlabStrategy

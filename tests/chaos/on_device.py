"""Program of the ranks of a campaign whose tensors are on a GPU that they share, and the faults there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import hvdlab.torch as hvd
from chaos.victim import Training, Victim


class DeviceTraining(Training):
    """A rank's model, data and place in the training, in tensors of torch.

    Args:
        seed, mailbox: As in :class:`Training`.
        device: Where the tensors are, as torch names it. ``cpu`` has the campaign itself tested where there is no GPU.
    """

    ops = hvd

    def __init__(self, seed: int, mailbox: str, device: str) -> None:
        self.device = torch.device(device)
        super().__init__(seed, mailbox)

    def tensor(self, values: npt.NDArray[Any]) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def values(self, tensor: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = tensor.detach().cpu().numpy()
        return found

    def forget(self) -> int:
        left = super().forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return left

    def used(self) -> int:
        """Return bytes of the GPU that are in use, by all processes together."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


def _exhaust(victim: Victim, order: dict[str, Any]) -> None:
    """Allocate more memory than the GPU has."""
    assert isinstance(victim, DeviceTraining)
    total = torch.cuda.mem_get_info(victim.device)[1]
    torch.empty(2 * total, dtype=torch.uint8, device=victim.device)


def _fault(victim: Victim, order: dict[str, Any]) -> None:
    """Have a kernel read where there is no memory: the process can't use the GPU any more, and its memory there is
    gone."""
    assert isinstance(victim, DeviceTraining)
    torch.ones(3, device=victim.device)[torch.tensor([10**9], device=victim.device)]
    torch.cuda.synchronize(victim.device)


DeviceTraining.deeds = {**Training.deeds, "exhaust_device": _exhaust, "fault_device": _fault}

"""Whether there is a GPU of NVIDIA's to test on, and which of them a rank uses."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

from hvdlab.collectives.planes.gpu import gpu_plane

if TYPE_CHECKING:
    import torch

ASK = "from hvdlab.collectives.planes.gpu.ipc_plane import CudaPlane; print(CudaPlane.unavailable() or '', end='')"


@cache
def why_no_gpu() -> str:
    """Return why there is no GPU; empty if there is one. A process of its own asks the driver: one that has used it
    can't fork ranks."""
    reason = gpu_plane.why_missing()
    if reason is not None:
        return reason
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout if done.returncode == 0 else done.stderr[-2000:]


def become_host_of_nccl(rank: int) -> None:
    """Make this rank look like a host of its own to NCCL, which lets no two ranks of one host share a GPU. Before its first group."""
    own = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ.update(own)


def choose_gpu(local_rank: int, local_size: int) -> torch.device:
    """Choose this rank's GPU, as a user does, and return it. Ranks that share one become hosts of NCCL's."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus < local_size:
        become_host_of_nccl(local_rank)
    torch.cuda.set_device(local_rank % gpus)
    return torch.device("cuda", local_rank % gpus)

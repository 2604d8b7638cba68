"""How a process group is watched: the options of a group, and the variable that holds where it has none."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from hvdlab.collectives.errors import InvalidRequestError

VARIABLE = "HVDLAB_C10D_WATCH"
LATE_AFTER = 5.0
"""Seconds after which a launch that has not ended counts as late: longer than most steps of training wait for their slowest rank."""
_WAYS = ("", "agreed", "watched")
_INNERS = ("", "gloo", "nccl")
_NO_GPU = "none"
"""The identifier that a rank without a GPU shows."""


@dataclasses.dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of a process group, given as ``pg_options`` to ``init_process_group`` or ``new_group``.

    All ranks of a group must give the same. Empty values stand for those of ``HVDLAB_C10D_WATCH``, such as ``watched`` or
    ``watched:gloo``, and after that for the default: groups are watched with NCCL inside if torch has that and each rank uses a
    GPU of its own when the group is made, and agreed otherwise.

    Attributes:
        watch: ``watched``: operations are handed over to a group of torch's own, and the ranks are compared when one is late.
            ``agreed``: each operation is agreed through the coordinator before it begins.
        inner: The backend of torch's inside of a watched group: ``nccl`` for CUDA tensors, or ``gloo`` for tensors of the host. By default
            ``nccl`` if torch has that and each rank uses a GPU of its own, and ``gloo`` otherwise.
        late: Seconds after which an operation of a watched group that has not ended counts as late.
    """

    watch: str = ""
    inner: str = ""
    late: float = LATE_AFTER

    def __post_init__(self) -> None:
        if self.watch not in _WAYS or self.inner not in _INNERS or not self.late > 0:
            raise InvalidRequestError(
                f"{self}: watch is 'agreed' or 'watched', inner is 'gloo' or 'nccl', and late is a positive number of seconds."
            )

    def inner_backend(self, store: Any, rank: int, size: int) -> str:
        """Return the backend of the inner group; empty for a group that is agreed. All ranks of the group call it.

        Args:
            store: Torch's store for this group.
            rank, size: This rank in the group, and how many there are.

        Raises:
            InvalidRequestError: ``HVDLAB_C10D_WATCH`` holds neither of the two ways.
        """
        way, inner = self.watch, self.inner
        if not way:
            way, _, of_variable = os.environ.get(VARIABLE, "").partition(":")
            inner = inner or of_variable
            if way not in _WAYS or inner not in _INNERS:
                raise InvalidRequestError(
                    f"{VARIABLE}={os.environ[VARIABLE]!r}: give agreed, watched, watched:gloo or watched:nccl."
                )
        if way == "agreed":
            return ""
        if inner:
            return inner
        has_nccl = dist.is_nccl_available()
        on_gpus = torch.cuda.is_available() and has_nccl
        # All ranks take part where torch was built with NCCL, also those without a GPU: others would wait in the store for them. Without NCCL,
        # which all ranks' torch has or lacks, nothing is left in the user's store.
        if has_nccl and have_a_gpu_each(store, rank, size, gpu_in_use() if on_gpus else ""):
            return "nccl"
        # By the GPUs of all ranks, not by this rank's alone: ranks that make inner groups of two kinds wait for each other.
        return "gloo" if way else ""


def gpu_in_use() -> str:
    """Return the identifier of this process's present GPU, which no other GPU of any host has."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "uuid", f"{platform.node()} {torch.cuda.current_device()}"))


def have_a_gpu_each(store: Any, rank: int, size: int, gpu: str) -> bool:
    """Return whether each rank uses a GPU, and no two the same one, which NCCL refuses. All ranks call it, and get the same answer.

    Args:
        store: Torch's store for the group.
        rank, size: This rank in the group, and how many there are.
        gpu: The identifier of this rank's GPU; empty if it uses none.
    """
    store.set(f"watched.gpu.{rank}", gpu or _NO_GPU)
    if not gpu:
        return False  # whatever the others have, and without waiting for them
    used = {bytes(store.get(f"watched.gpu.{other}")) for other in range(size)}
    return len(used) == size and _NO_GPU.encode() not in used

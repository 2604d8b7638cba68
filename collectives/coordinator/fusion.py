"""From rounds that are ready to batches, which are executed as one operation each."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.signatures import FuseKey

FUSION_THRESHOLD = 64 * 1024 * 1024
"""Bytes of tensors that are fused into one operation at most (a tensor that alone is larger is not split)."""


def fuse(ready: Sequence[Round], threshold: int, *, separate_groups: bool = False) -> list[list[Round]]:
    """Gather allreduces of one kind into batches of up to ``threshold`` bytes.

    Batches are in the order in which their first rounds became ready; within a batch that order holds too. A
    threshold of 0 fuses nothing. With ``separate_groups`` tensors of a group are fused with each other only.
    """
    batches: list[list[Round]] = []
    open_batches: dict[tuple[FuseKey, str], tuple[list[Round], int]] = {}
    for current in ready:
        if current.info.fuse_key is None:
            batches.append([current])
            continue
        key = (current.info.fuse_key, current.info.group if separate_groups else "")
        nbytes = current.info.nbytes
        batch, filled = open_batches.get(key, (None, 0))
        if batch is not None and filled + nbytes <= threshold:
            batch.append(current)
        else:
            batch, filled = [current], 0
            batches.append(batch)
        open_batches[key] = (batch, filled + nbytes)
    return batches

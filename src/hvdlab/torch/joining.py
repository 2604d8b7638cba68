"""Uneven data: a rank that has run out of batches joins, and the others go on."""

from __future__ import annotations

from hvdlab.collectives import context
from hvdlab.torch.process_sets import ProcessSet, global_process_set, set_id


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no data left, and wait until no rank has.

    Meanwhile the others need not wait for it: this rank takes part with zeros in their allreduces with ``hvd.Sum`` or
    ``hvd.Average`` (which divides by all ranks, those that have joined included), single, grouped or by a
    ``DistributedOptimizer``; barriers count it as present. Any other collective, and any other operator, raises
    ``HorovodInternalError`` on the ranks that submit it while some rank has joined; nothing else is touched by that.

    It can be used again and again, for example after each epoch of training.

    Args:
        device: Horovod's device for the zeros; of no effect, since they live in host memory.
        process_set: Ranks that join; all by default.

    Returns:
        The rank that joined last, the same on all ranks. It is the one that has seen most data.

    Raises:
        AbortedError: Another rank died, failed, left or was interrupted before all had joined.
    """
    return context.engine("hvd.join()").join(set_id(process_set))

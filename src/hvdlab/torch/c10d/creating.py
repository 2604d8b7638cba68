"""Makes a process group when torch calls for one."""

from __future__ import annotations

from typing import Any

from hvdlab.torch.c10d.backward import keep_errors
from hvdlab.torch.c10d.group import HvdlabProcessGroup
from hvdlab.torch.c10d.world import current_world, world_of_group


def create(options: Any) -> HvdlabProcessGroup:
    """Make a process group. Torch calls this on the group's members only, which wait for each other here.

    Args:
        options: Torch's options: ``store``, ``group_rank``, ``group_size``, ``timeout``, ``group_id`` and
            ``global_ranks_in_group``, which is empty for the default group.

    Raises:
        InvalidRequestError: The default group has another rank or size than hvdlab's world.
        StartError, AbortedError: There is no coordinator, or a rank that is needed did not answer, died or failed.
    """
    keep_errors()
    members = tuple(options.global_ranks_in_group)
    rank, size = options.group_rank, options.group_size
    world = current_world() if members else world_of_group(options.store, rank, size)
    return HvdlabProcessGroup(
        world, rank, size, options.group_id, members or world.engine.ranks(), options.timeout
    )

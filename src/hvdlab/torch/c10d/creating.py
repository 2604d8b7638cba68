"""Makes a process group when torch asks for one."""

from __future__ import annotations

from typing import Any

from hvdlab.torch.c10d.backward import keep_errors
from hvdlab.torch.c10d.group import HvdlabProcessGroup
from hvdlab.torch.c10d.world import current_world, world_of_group


def create(options: Any) -> HvdlabProcessGroup:
    """A process group; only its members come here, and they wait for each other.

    Args:
        options: Torch's: ``store``, ``group_rank``, ``group_size``, ``timeout``, ``group_id`` and
            ``global_ranks_in_group``, which is empty for the default group.
    """
    keep_errors()
    members = tuple(options.global_ranks_in_group)
    rank, size = options.group_rank, options.group_size
    world = current_world() if members else world_of_group(options.store, rank, size)
    return HvdlabProcessGroup(
        world, rank, size, options.group_id, members or world.engine.ranks(), options.timeout
    )

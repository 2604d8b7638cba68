"""Process sets: groups of ranks that have collectives of their own. They are the same for all frameworks."""

from __future__ import annotations

from hvdlab.collectives.process_sets import (
    GLOBAL_ID,
    ProcessSet,
    add_process_set,
    global_process_set,
    members,
    position,
    remove_process_set,
    set_id,
)

__all__ = [
    "GLOBAL_ID",
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "members",
    "position",
    "remove_process_set",
    "set_id",
]

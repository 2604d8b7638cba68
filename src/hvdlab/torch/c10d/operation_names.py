"""The names of a process group's operations in errors and recordings, such as ``all_reduce #17 of group dp``."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from hvdlab.collectives.errors import AbortedError, MismatchError
from hvdlab.collectives.text import compact_ranks

_UNNAMED = ("", "undefined")
_PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_PARAM_GROUP_FILE = os.path.join("_fully_shard", "_fsdp_param_group.py")
_FRAMES = 20
"""The most frames that lie between a collective of ``fully_shard`` and the object that knows the module."""
_HASH = re.compile("[0-9a-f]{40}")


class ModelPart(NamedTuple):
    """The part of a model that an operation is for.

    Attributes:
        name: Its name in recordings, such as ``layers.3``.
        about: The text that errors and stall lines add to the operation's name, such as `` for layers.3``.
    """

    name: str = ""
    about: str = ""


WHOLE = ModelPart()
"""Of an operation that is for no known part of a model."""

OPERATIONS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather of lists", 1),
    "allgather_coalesced": ("all_gather of lists", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter of lists", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", -1),
}
"""Torch's methods of a group: the operation's name, and which argument has the tensor whose shape and dtype the ranks compare."""


ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Methods whose options name a root."""


def is_local(name: str) -> bool:
    """Return whether torch made this name for a group that only its members make: a hash, which may differ from member to member.

    It differs because torch also hashes how many groups the process has.
    """
    return _HASH.fullmatch(name) is not None


def name_of_group(name: str, description: str, members: Sequence[int]) -> str:
    """Return a group's name for users: the description that they gave it, or torch's name, or its ranks if that is a hash.

    Args:
        name: Torch's name, such as ``0``.
        description: The user's ``group_desc=``, or torch's word for none.
        members: Its ranks.
    """
    if description not in _UNNAMED:
        return f"group {description}"
    return f"group of ranks {compact_ranks(members)}" if is_local(name) else f"group {name}"


def label_in_recordings(
    operation: str, name: str, description: str, members: Sequence[int], part: str = ""
) -> str:
    """Return an operation's name in timelines and traces: ``default_pg.all_reduce``, ``ranks 0-1.all_gather layers.3``.

    Args:
        operation: Its name in torch.
        name, description, members: Those of the group, as for :func:`name_of_group`.
        part: The part of a model that it is for, if that is known.
    """
    group = name_of_group(name, description, members).removeprefix("group ").removeprefix("of ")
    return f"{group}.{operation} {part}".rstrip()


def sharded_module() -> str:
    """Return the module whose parameters ``fully_shard`` gathers, or whose gradients it reduces, in this call.

    Returns:
        Its name in the model, such as ``layers.3``, ``the root`` for the model itself, and an empty text for other calls.
    """
    if _PARAM_GROUP not in sys.modules:
        return ""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename.endswith(_PARAM_GROUP_FILE):
            name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            return "" if name is None else str(name) or "the root"
        frame = frame.f_back
    return ""


def renamed(error: Exception, operation: str, why: str = "", about: str = "") -> Exception:
    """Return an error of the core, with c10d's name of the operation in place of the core's.

    Args:
        error: As a handle raised it. Errors that name no collective are returned as they are.
        operation: Its name, such as ``all_reduce #17 of group dp``. The number is counted by the rank on which the error is raised.
        why: Further facts about the error's cause, in a sentence.
        about: The part of a model that ``operation`` ends with; it is removed from the call sites, where it would stand again.
    """
    if type(error) is AbortedError:
        # Ranks that wait in torch's own calls, such as dist.new_group, have the call's name for a site: it would stand twice in the text.
        sites = {
            rank: "" if site == operation else site.removesuffix(about)
            for rank, site in error.pending.sites.items()
        }
        # With a name that ends so, the error's text shows only the collective.
        pending = dataclasses.replace(
            error.pending, collective=operation, name=f"{operation}.noname", sites=sites
        )
        cause = error.cause
        if why:
            cause = dataclasses.replace(cause, text=f"{cause.text}; {why}")
        return AbortedError(pending, cause, error.process_set, error.generation)
    if type(error) is MismatchError:
        mismatch = MismatchError(operation, error.process_set, error.groups).because_of(error.decision)
        if why:
            mismatch.add_note(why)
        return mismatch
    return error

"""What an operation of a process group is called in errors: ``all_reduce #17 of group dp``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from hvdlab.collectives.errors import AbortedError, MismatchError, compact_ranks

_UNNAMED = ("", "undefined")
_HASH = re.compile("[0-9a-f]{40}")


def is_local(name: str) -> bool:
    """Whether torch made this name for a group that its members make alone: it is a hash, which differs between them.

    Part of what is hashed is how many groups the process has.
    """
    return _HASH.fullmatch(name) is not None


def name_of_group(name: str, description: str, members: Sequence[int]) -> str:
    """How users know a group: by the description that they gave it, else by torch's name or its ranks.

    Args:
        name: Torch's name, such as ``0``.
        description: What was given as ``group_desc=``, or torch's word for none.
        members: Its ranks.
    """
    if description not in _UNNAMED:
        return f"group {description}"
    return f"group of ranks {compact_ranks(members)}" if is_local(name) else f"group {name}"


def label_in_recordings(operation: str, name: str, description: str, members: Sequence[int]) -> str:
    """What timelines and traces call an operation: ``default_pg.all_reduce``, ``ranks 0-1.all_gather``.

    Args:
        operation: Its name in torch.
        name, description, members: Of the group, as for :func:`name_of_group`.
    """
    group = name_of_group(name, description, members).removeprefix("group ").removeprefix("of ")
    return f"{group}.{operation}"


def renamed(error: Exception, operation: str) -> Exception:
    """An error of the core, with c10d's name of the operation in place of the core's.

    Args:
        error: As a handle raised it. Errors that name no collective are returned as they are.
        operation: Such as ``all_reduce #17 of group dp``. The number is that of the rank that the error is raised on.
    """
    if type(error) is AbortedError:
        # A name of this form is not shown beside the kind.
        pending = dataclasses.replace(error.pending, collective=operation, name=f"{operation}.noname")
        return AbortedError(pending, error.cause, error.process_set, error.epoch)
    if type(error) is MismatchError:
        return MismatchError(operation, error.process_set, error.groups)
    return error

"""torch's interface for the repair of a group, which torch has from 2.14 on and calls experimental: hvdlab is the rendezvous that it leaves out.

In torch's interface each rank has a *handle* of its group, and all ranks give the handles of all to ``reconfigure``. How they exchange the handles is
left to the user. :func:`reconfigure` does it by a collective of hvdlab's world, in which only ranks take part that live.

hvdlab's own groups repair themselves after each failure, so there is nothing to do for them but to meet.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.torch.c10d.world import C10dWorld
from hvdlab.torch.functions import allgather_object

_UUID_BITS = 62
"""Random bits of a reconfiguration's number, which must be fresh each time and is a signed integer of 64 bits in torch."""
_HANDLE = "hvdlab"


class TorchReconfiguration(Protocol):
    """Options of torch's ``reconfigure``, as far as hvdlab's groups use them.

    Attributes:
        uuid: Number of this reconfiguration, equal on all ranks.
        handles: The ranks' handles: a list in the order of ranks, or a set.
    """

    uuid: int
    handles: Iterable[str]


def reconfigure(group: Any = None, timeout: timedelta | None = None) -> tuple[int, ...]:
    """Repair a group of torch's, with the ranks of hvdlab's world that live. All of them call it, and wait for each other.

    Args:
        group: A group that was made with ``enable_reconfigure=True``, such as one of torch's ``gloo``, or one of hvdlab's; by default
            the default group.
        timeout: Limit of torch's part; by default that of the group's backend.

    Returns:
        The ranks of hvdlab's world in the group, by their numbers in it.

    Raises:
        UnsupportedError: This torch has no interface for it, or the group's backend does not support it.
        AbortedError: A rank died or failed meanwhile; the world goes on, and the call can be made again.
        RuntimeError: Torch could not connect the ranks.
    """
    torch_reconfigure = getattr(dist, "_reconfigure", None)
    if torch_reconfigure is None:
        raise UnsupportedError(
            "This torch can't reconfigure a group: its interface for that begins with torch 2.14."
        )
    found: Any = dist.group.WORLD if group is None else group
    if not found.supports_reconfigure:
        raise UnsupportedError(
            f"The backend of group {found.group_name} can't be reconfigured. Make the group with enable_reconfigure=True and a backend "
            "that supports it, such as gloo."
        )
    engine = context.init()
    # The group is repaired with the ranks that live. Torch's own error was for the lost ones, or the ranks that this call returns show them.
    engine.acknowledge_losses()
    mine = engine.rank, found.get_reconfigure_handle(), secrets.randbits(_UUID_BITS)
    # In the order of ranks on all of them, so all take the first one's number.
    offers = allgather_object(mine)
    uuid, ranks = offers[0][2], tuple(rank for rank, _, _ in offers)
    store = context.companion(C10dWorld).store
    if store is not None:  # in which torch's backend exchanges addresses, under keys with the new number
        store.set_members(ranks)
    torch_reconfigure(
        uuid=uuid, handles=[handle for _, handle, _ in offers], group=found, timeout=timeout
    ).wait()
    return ranks


def handle_of(name: str, rank: int) -> str:
    """Return the handle of a rank of a group of hvdlab's."""
    return f"{_HANDLE}:{name}:{rank}"


def require_same_ranks(name: str, ranks: int, options: TorchReconfiguration) -> None:
    """Raise ``InvalidRequestError`` if the handles are not those of all ranks of a group of hvdlab's, in their order.

    Args:
        name: The group's name in the core.
        ranks: How many ranks it has.
        options: Torch's options.
    """
    handles = options.handles
    own = [handle_of(name, rank) for rank in range(ranks)]
    is_same = set(handles) == set(own) if isinstance(handles, set) else list(handles) == own
    if not is_same:
        raise InvalidRequestError(
            f"A group of hvdlab's keeps its {ranks} ranks and their order, and {len(list(handles))} other handles were given. "
            'Call init_process_group("hvdlab") again: it makes the group of the ranks that there are.'
        )

"""broadcast: one rank's tensor on all ranks.

``root_rank`` is a rank of the world, also within a process set. Shape and dtype are equal on all ranks; ``name`` and
errors are as for allreduce.
"""

from __future__ import annotations

import operator

import torch

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.autograd import collective
from hvdlab.torch.compiling import untraced
from hvdlab.torch.handles import Handle
from hvdlab.torch.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.torch.submission import Operation, run, submit


@untraced
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a new tensor with the values of ``root_rank``'s on every rank; ``tensor`` gives the shape and dtype.

    Differentiable: the root's gradient is the *average* of the gradients over all ranks, the others' is zero.
    """
    return collective(_operation(root_rank, process_set), tensor, name)


@untraced
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast` (without gradients)."""
    return submit(_operation(root_rank, process_set), tensor, name)


@untraced
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with ``root_rank``'s on every other rank, and return it. No gradients."""
    return run(_operation(root_rank, process_set), tensor, name, in_place=True)[0]


@untraced
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`; the tensor must be neither read nor changed until it is done."""
    return submit(_operation(root_rank, process_set), tensor, name, in_place=True)


def _operation(root_rank: int, process_set: ProcessSet) -> Operation:
    try:
        root = operator.index(root_rank)
    except TypeError:
        raise InvalidRequestError(f"root_rank takes the number of a rank, not {root_rank!r}.") from None
    return Operation(OpKind.BROADCAST, root=root, process_set=set_id(process_set))

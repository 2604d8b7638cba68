"""alltoall: each rank sends some rows of its tensor to each rank.

Dtype and dimensions but for the first are equal on all ranks. ``splits[i]`` rows go to the ``i``-th rank; without
splits the rows must divide evenly. ``name`` and errors are as for allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.arguments import row_counts
from hvdlab.torch.autograd import exchange
from hvdlab.torch.compiling import untraced
from hvdlab.torch.handles import Handle
from hvdlab.torch.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.torch.submission import Operation, submit


@untraced
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to every rank, and return the rows received, in the order of the ranks they came from.

    Args:
        tensor: At least one dimension.
        splits: Rows for each rank (integers; their sum is the number of rows), or ``None`` for even ones.
        name: See :mod:`hvdlab.torch.allreducing`.
        process_set: Who takes part.

    Returns:
        The output; with ``splits`` the pair of the output and the number of rows received from each rank (int32).

    Differentiable: gradients go back the way the rows came.
    """
    output, received = exchange(_operation(tensor, splits, process_set), tensor, name)
    return output if splits is None else (output, received)


@untraced
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`alltoall` (without gradients); ``synchronize`` always gives the pair, as Horovod does."""
    return submit(_operation(tensor, splits, process_set), tensor, name)


def _operation(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet
) -> Operation:
    if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
        raise InvalidRequestError("alltoall splits dimension 0, which a 0-d tensor does not have.")
    return Operation(OpKind.ALLTOALL, process_set=set_id(process_set), splits=row_counts(splits))

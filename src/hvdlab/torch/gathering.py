"""allgather: the ranks' tensors, one after the other along dimension 0.

The tensors have equal dtype and equal dimensions but for the first, which may differ and may be 0. A 0-d tensor
counts as one row. ``name`` and errors are as for allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlab.collectives.dtypes import OpKind
from hvdlab.torch.arguments import tensor_list
from hvdlab.torch.autograd import collective, collectives
from hvdlab.torch.compiling import untraced
from hvdlab.torch.handles import Handle
from hvdlab.torch.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.torch.submission import Operation, submit, submit_group


@untraced
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks, in the order of the ranks; every rank gets all of it.

    Differentiable: a rank's gradient is its own rows of the *average* of the gradients over all ranks.
    """
    return collective(_operation(process_set), tensor, name)


@untraced
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather` (without gradients); the tensor must not change until it is done."""
    return submit(_operation(process_set), tensor, name)


@untraced
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors, executed together."""
    return collectives(_operation(process_set), tensor_list(tensors), name)


@untraced
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`grouped_allgather` (without gradients); ``synchronize`` gives the list of outputs."""
    return submit_group(_operation(process_set), tensor_list(tensors), name)


def _operation(process_set: ProcessSet) -> Operation:
    return Operation(OpKind.ALLGATHER, process_set=set_id(process_set))

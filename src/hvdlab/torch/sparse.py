"""Reduction of sparse COO tensors: the ranks gather all entries, and each rank adds them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlab.bindings.arguments import Average, Sum, checked_operator
from hvdlab.bindings.handles import Handle, Part
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.errors import UnsupportedError
from hvdlab.torch.adapter import BINDING
from hvdlab.torch.compiling import untraced
from hvdlab.torch.process_sets import ProcessSet, global_process_set, set_id


@untraced
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp | int,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start the sum or average of a sparse COO tensor over all ranks.

    Args:
        tensor: A sparse COO tensor. Equal shape, dtype and number of sparse dimensions on all ranks; any number of entries.
        name: Equal on all ranks, and not in flight twice; calls without a name are matched in order.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: The ranks that take part; all by default.

    Returns:
        A handle. ``hvd.synchronize(handle)``, and calling the handle itself, waits and returns a new coalesced sparse tensor of
        the same shape and dtype. float16 and bfloat16 are added up in float32 and rounded once; averages of integers are
        truncated toward zero.

    Raises:
        UnsupportedError: ``op`` is neither average nor sum.
        InvalidRequestError: ``op`` is no operator, or this rank is not in the process set.
    """
    chosen = checked_operator(op)
    if chosen not in (Average, Sum):
        raise UnsupportedError(
            f"Sparse tensors can be averaged and summed, not reduced by {chosen.name.lower()}; "
            "use tensor.to_dense()."
        )
    entries = tensor.detach().coalesce()
    shape = entries.shape

    def finish(outputs: list[torch.Tensor], parts: Sequence[Part[torch.Tensor]]) -> torch.Tensor:
        divisor = len(parts[0].result.tables) if chosen is Average else 1
        return _added_up(outputs[0].t(), outputs[1], shape, divisor)

    # An allgather concatenates rows, so each entry has to be a row: the indices are sent transposed.
    operation = Operation(OpKind.ALLGATHER, process_set=set_id(process_set))
    return BINDING.submit_group(operation, [entries.indices().t(), entries.values()], name, finish=finish)


def _added_up(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int) -> torch.Tensor:
    dtype = values.dtype
    wide = values.float() if dtype in (torch.float16, torch.bfloat16) else values
    whole = divisor != 1 and not dtype.is_floating_point
    if whole:
        # Add up quotients and remainders apart: their sums fit in 64 bits where the sum of the values may not.
        remainders = wide.long().fmod(divisor)
        wide = torch.stack([(wide.long() - remainders) // divisor, remainders], -1)
        shape = torch.Size((*shape, 2))
    total = torch.sparse_coo_tensor(indices, wide, shape, check_invariants=True).coalesce()
    added = total.values()
    if whole:
        quotients, rest = added.unbind(-1)
        added = quotients + rest // divisor
        added += (added < 0) & (rest % divisor > 0)  # toward zero
        shape = shape[:-1]
    elif divisor != 1:
        added = added / divisor
    return torch.sparse_coo_tensor(
        total.indices(), added.to(dtype), shape, is_coalesced=True, check_invariants=True
    )

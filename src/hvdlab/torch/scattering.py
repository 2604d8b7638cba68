"""reducescatter: a reduction whose result is split over the ranks along dimension 0.

With ``d`` rows and ``n`` ranks each rank gets ``d // n`` rows, the first ``d % n`` ranks one more. Operators (but for
``hvd.Adasum``, which is refused), scale factors, ``name`` and errors are as for allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.arguments import Average, reduction, tensor_list
from hvdlab.torch.autograd import collective, collectives
from hvdlab.torch.compiling import untraced
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.handles import Handle
from hvdlab.torch.process_sets import ProcessSet, global_process_set
from hvdlab.torch.submission import Operation, submit, submit_group


@untraced
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor of at least one dimension over all ranks, and return this rank's rows of the result.

    Differentiable: the gradient of ``hvd.Average`` and ``hvd.Sum`` is the allgather of the gradients, times the number
    of ranks for ``hvd.Sum``, times the scale factors; that of the other operators is the derivative of the sum of the
    ranks' losses.
    """
    operation = _operation(op, prescale_factor, postscale_factor, process_set, [tensor])
    sent, context = compression.compress(tensor)
    return compression.decompress(collective(operation, sent, name), context)


@untraced
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter` (without gradients); the tensor must not change until it is done."""
    return submit(_operation(op, prescale_factor, postscale_factor, process_set, [tensor]), tensor, name)


@untraced
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors, executed together."""
    given = tensor_list(tensors)
    operation = _operation(op, prescale_factor, postscale_factor, process_set, given)
    compressed = [compression.compress(tensor) for tensor in given]
    outputs = collectives(operation, [sent for sent, _ in compressed], name)
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, compressed, strict=True)
    ]


@untraced
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter` (without gradients); ``synchronize`` gives the list of outputs."""
    return submit_group(
        _operation(op, prescale_factor, postscale_factor, process_set, tensors), tensors, name
    )


def _operation(
    op: ReduceOp | int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    tensors: Sequence[torch.Tensor],
) -> Operation:
    if any(isinstance(tensor, torch.Tensor) and tensor.dim() == 0 for tensor in tensors):
        raise InvalidRequestError("reducescatter splits dimension 0, which a 0-d tensor does not have.")
    return reduction(OpKind.REDUCESCATTER, None, op, prescale_factor, postscale_factor, process_set)

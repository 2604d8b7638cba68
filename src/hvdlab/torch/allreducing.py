"""allreduce in its eight forms: one tensor or a group, waiting or not, into a new tensor or in place.

Common to all of them:

- *Tensors* have the same shape and dtype on every rank: any dtype of ``hvdlab.collectives.dtypes.DType``, any shape,
  0-d and empty ones included. CPU tensors that are contiguous are read and written where they are; others are copied
  to host memory and back.
- ``op`` is ``hvd.Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``. ``average=`` is its
  deprecated form. Adasum, which treats each tensor of a group on its own, takes floating-point tensors; its formula is
  in :mod:`hvdlab.collectives.reduce.adasum`.
  Integers are averaged and scaled in float64 and truncated; float16 and bfloat16 are accumulated in float32.
- ``prescale_factor`` multiplies the inputs, ``postscale_factor`` the result.
- ``name`` must be equal on all ranks and not in flight twice; collectives without one are matched in order.
- ``InvalidRequestError`` is raised for a wrong argument before anything is sent. ``MismatchError`` and
  ``AbortedError`` are raised by the waiting functions and by ``hvd.synchronize``; outputs, and tensors given in
  place, are undefined then, other inputs are untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.torch.arguments import reduction, tensor_list
from hvdlab.torch.autograd import collective, collectives
from hvdlab.torch.compiling import untraced
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.handles import Handle, synchronize
from hvdlab.torch.process_sets import ProcessSet, global_process_set
from hvdlab.torch.sparse import sparse_allreduce_async
from hvdlab.torch.submission import run, submit, submit_group

_KIND = OpKind.ALLREDUCE


@untraced
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks into a new one of its shape, dtype and device.

    Differentiable: the gradient of ``hvd.Average`` and ``hvd.Sum`` is the same reduction of the gradients, that of the
    other operators the derivative of the sum of the ranks' losses. Every rank must run the backward pass. A sparse COO tensor is gathered and summed or averaged, and is not differentiable.
    ``compression`` applies to what is sent.
    """
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
        output: torch.Tensor = synchronize(sparse_allreduce_async(tensor, name, operation.op, process_set))
        factor = operation.prescale * operation.postscale
        return output if factor == 1.0 else (output * factor).to(output.dtype)
    sent, context = compression.compress(tensor)
    return compression.decompress(collective(operation, sent, name), context)


@untraced
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce` (without gradients); the tensor must not change until it is done."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    return submit(operation, tensor, name)


@untraced
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place and return it. No gradients."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    return run(operation, tensor, name, in_place=True)[0]


@untraced
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce_`; the tensor must be neither read nor changed until it is done."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    return submit(operation, tensor, name, in_place=True)


@untraced
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors, executed together once each of them is there on every rank."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    compressed = [compression.compress(tensor) for tensor in tensor_list(tensors)]
    outputs = collectives(operation, [sent for sent, _ in compressed], name)
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, compressed, strict=True)
    ]


@untraced
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce` (without gradients); ``synchronize`` gives the list of outputs."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    return submit_group(operation, tensor_list(tensors), name)


@untraced
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """:func:`allreduce_` of several tensors, executed together; returns them as a list."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    outputs: list[torch.Tensor] = submit_group(operation, tensor_list(tensors), name, in_place=True).wait()
    return outputs


@untraced
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce_`; the tensors must be neither read nor changed until it is done."""
    operation = reduction(_KIND, average, op, prescale_factor, postscale_factor, process_set)
    return submit_group(operation, tensor_list(tensors), name, in_place=True)

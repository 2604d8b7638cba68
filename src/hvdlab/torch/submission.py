"""From tensors to requests of the collective core: the one place where the binding submits anything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.reduce.support import check_supported
from hvdlab.torch.conversion import OutputAllocator, core_dtype, is_direct, staged, storage_view
from hvdlab.torch.handles import Deliver, Finish, Handle, Part, every, only, with_splits

_SHAPED_BY_RANKS = frozenset({OpKind.ALLGATHER, OpKind.REDUCESCATTER, OpKind.ALLTOALL})
"""Collectives whose output's shape depends on the other ranks, or on how many there are."""


Output = torch.Tensor | OutputAllocator


class Operation(NamedTuple):
    """What is asked for, apart from the tensors.

    Attributes:
        kind: Which collective.
        op: Reduction operator.
        prescale: Factor for the inputs.
        postscale: Factor for the result.
        root: Rank a broadcast comes from.
        process_set: Id of the process set.
        splits: Rows for each rank of an alltoall.
    """

    kind: OpKind
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    process_set: int = 0
    splits: tuple[int, ...] | None = None


def submit(
    operation: Operation,
    tensor: torch.Tensor,
    name: str | None,
    *,
    in_place: bool = False,
    announce: bool = True,
) -> Handle:
    """Start a collective on one tensor; ``in_place`` writes the result to it.

    Without ``announce`` the caller is to see to it that it is announced; see ``Engine.submit``.

    The handle yields the output, or for an alltoall the output and the received splits.
    """
    request, output, deliver = _request(operation, tensor, in_place)
    request.name = name
    part = Part(context.engine().submit(request, announce=announce), output, deliver)
    return Handle((part,), with_splits if operation.kind is OpKind.ALLTOALL else only)


def run(
    operation: Operation, tensor: torch.Tensor, name: str | None, *, in_place: bool = False
) -> tuple[torch.Tensor, Result]:
    """Run a collective on one tensor and wait: cheaper than a handle, since nothing is handed to another thread.

    Returns:
        The output, and what the core said of it.
    """
    request, output, deliver = _request(operation, tensor, in_place)
    request.name = name
    result = context.engine().run(request)
    if isinstance(output, OutputAllocator):
        output = output.allocated
    return (output if deliver is None else deliver(output)), result


def submit_group(
    operation: Operation,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    *,
    in_place: bool = False,
    finish: Finish = every,
    announce: bool = True,
) -> Handle:
    """Start a collective on tensors that are executed together; the handle yields the list of outputs.

    All arguments are checked before the first tensor is sent, so that an error here leaves no half a group behind.
    """
    engine = context.engine()
    base = name or f"grouped_{operation.kind.label}.noname"
    prepared = [_request(operation, tensor, in_place) for tensor in tensors]
    for number, (request, _, _) in enumerate(prepared):
        request.name = f"{base}.{number}"
        request.anonymous = name is None
        request.group = (base, len(prepared))
    handles = engine.submit_group([request for request, _, _ in prepared], announce=announce)
    parts = [
        Part(handle, output, deliver) for handle, (_, output, deliver) in zip(handles, prepared, strict=True)
    ]
    return Handle(parts, finish)


def _request(
    operation: Operation, tensor: torch.Tensor, in_place: bool
) -> tuple[Request, Output, Deliver | None]:
    """A request without a name, what its output will be in, and how that gets to the user."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(
            f"{operation.kind.label} takes a torch.Tensor, not {type(tensor).__name__}."
        )
    dtype = core_dtype(tensor)
    check_supported(operation.kind, dtype, operation.op)
    direct = is_direct(tensor)
    source = tensor if direct else staged(tensor)
    request = Request(
        operation.kind,
        dtype=dtype,
        op=operation.op,
        prescale=operation.prescale,
        postscale=operation.postscale,
        root=operation.root,
        splits=operation.splits,
        process_set=operation.process_set,
    )
    output: Output
    if operation.kind in _SHAPED_BY_RANKS:
        request.input = storage_view(source)
        request.allocate = output = OutputAllocator(source.dtype)
    elif in_place or not direct:
        request.input = request.output = storage_view(source)
        output = source
    elif operation.kind is OpKind.BROADCAST:
        output = _broadcast_buffer(source, operation.root)
        request.input = request.output = storage_view(output)
    else:
        output = torch.empty_like(source, requires_grad=False)
        request.input, request.output = storage_view(source), storage_view(output)
    if in_place:
        return request, output, _written_to(tensor, direct)
    return request, output, None if tensor.is_cpu else partial(torch.Tensor.to, device=tensor.device)


def _broadcast_buffer(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """What a broadcast that leaves its argument alone works on: read at the root, written elsewhere."""
    if context.engine().rank == root:
        return tensor.detach().clone()
    return torch.empty_like(tensor, requires_grad=False)


def _written_to(tensor: torch.Tensor, direct: bool) -> Deliver | None:
    """How the result gets into a tensor that is worked on in place; ``None`` if the core writes to its memory."""
    if not direct:

        def write_back(output: torch.Tensor) -> torch.Tensor:
            tensor.detach().copy_(output)
            return tensor

        return write_back
    if not tensor.is_inference():
        # The core's write is invisible to autograd; with this a backward pass that saved the tensor complains.
        torch.autograd.graph.increment_version(tensor)
    return None

"""Collectives on torch tensors, and queries of the world, under Horovod's name for their module, ``horovod.torch.mpi_ops``.

Tensors are of any dtype of ``hvdlab.collectives.types.DType`` and on any device. The core reads and writes contiguous CPU
tensors where they are, and contiguous CUDA tensors if the process set has a data plane for CUDA; it works on copies of others.

The forms that wait and return new tensors are differentiable; every rank must then run the backward pass.
:func:`hvdlab.bindings.docstrings.documented` adds to each docstring the text that all forms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlab.bindings import arguments, handles
from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum, checked_operator
from hvdlab.bindings.compression import all_compressed, compressed
from hvdlab.bindings.docstrings import documented
from hvdlab.bindings.framework_hooks import devices_in_use
from hvdlab.bindings.handles import Handle, Part
from hvdlab.bindings.operations import Operation, reduced_at_once
from hvdlab.collectives import basics, context
from hvdlab.collectives.basics import (
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlab.collectives.context import shown_number
from hvdlab.collectives.errors import CollectiveError as HorovodInternalError
from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.metrics.sampler import ask_frameworks
from hvdlab.collectives.planes.base import HostArray
from hvdlab.collectives.process_sets import (
    GLOBAL_ID,
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    set_id,
)
from hvdlab.collectives.types import OpKind, ReduceOp
from hvdlab.horovod.common.util import get_average_backwards_compatibility_fun
from hvdlab.horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdlab.torch.adapter import ADAPTER, BINDING, plain_array, register_conversions
from hvdlab.torch.autograd import collective, collectives, exchange
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.dynamo import untraced

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(arguments)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    ask_frameworks(devices_in_use)
    basics.init(comm, process_sets)
    register_conversions()


init.__doc__ = basics.init.__doc__

# -- allreduce --------------------------------------------------------------------------------------------------------


@untraced
@documented
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

    Differentiable: the gradient of ``hvd.Average`` and ``hvd.Sum`` is the same reduction of the gradients; that of the
    other operators is the derivative of the sum of the ranks' losses. Every rank must run the backward pass.

    A sparse COO tensor can be summed and averaged, by an allgather of its entries; its result is not differentiable.
    """
    if average is None and prescale_factor == 1.0 == postscale_factor and compression is Compression.none:
        array = plain_array(tensor)
        if array is not None and not tensor.requires_grad:
            reduced = torch.empty_like(tensor)
            if _reduced(array, reduced.numpy(), name, op, process_set):
                return reduced
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
        chosen, prescale, postscale = operation.reduction
        output: torch.Tensor = synchronize(sparse_allreduce_async(tensor, name, chosen, process_set))
        factor = prescale * postscale
        return output if factor == 1.0 else (output * factor).to(output.dtype)
    return compressed(compression, tensor, lambda sent: collective(operation, sent, name))


@untraced
@documented
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce` (without gradients)."""
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit(operation, tensor, name)


@untraced
@documented
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
    if average is None and prescale_factor == 1.0 == postscale_factor:
        array = plain_array(tensor)
        if array is not None:
            # Before the core writes. If it declines, the call below marks the tensor once more, which does no
            # harm.
            ADAPTER.mark_written(tensor)
            if _reduced(array, array, name, op, process_set):
                return tensor
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.run(operation, tensor, name, in_place=True)[0]


@untraced
@documented
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce_`."""
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit(operation, tensor, name, in_place=True)


@untraced
@documented
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
    """Reduce several tensors as by :func:`allreduce`, executed together once every rank has submitted all of them."""
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    given = arguments.tensor_list(ADAPTER, tensors)
    return all_compressed(compression, given, lambda sent: collectives(operation, sent, name))


@untraced
@documented
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
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit_group(operation, arguments.tensor_list(ADAPTER, tensors), name)


@untraced
@documented
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors as by :func:`allreduce_`, executed together; returns them as a list."""
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    outputs: list[torch.Tensor] = BINDING.submit_group(
        operation, arguments.tensor_list(ADAPTER, tensors), name, in_place=True
    ).wait()
    return outputs


@untraced
@documented
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce_`."""
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit_group(operation, arguments.tensor_list(ADAPTER, tensors), name, in_place=True)


# -- allgather --------------------------------------------------------------------------------------------------------


@untraced
@documented
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks, in the order of the ranks; every rank gets the whole.

    Differentiable: a rank's gradient is its own rows of the *average* of the gradients over all ranks.
    """
    return collective(_gathering(process_set), tensor, name)


@untraced
@documented
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather` (without gradients)."""
    return BINDING.submit(_gathering(process_set), tensor, name)


@untraced
@documented
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors as by :func:`allgather`, executed together."""
    return collectives(_gathering(process_set), arguments.tensor_list(ADAPTER, tensors), name)


@untraced
@documented
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`grouped_allgather` (without gradients); ``synchronize`` gives the list of outputs."""
    return BINDING.submit_group(_gathering(process_set), arguments.tensor_list(ADAPTER, tensors), name)


# -- broadcast --------------------------------------------------------------------------------------------------------


@untraced
@documented
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return, on every rank, a new tensor with the values of ``root_rank``'s; ``tensor`` gives the shape and dtype.

    Differentiable: the root's gradient is the *average* of the gradients over all ranks, the others' is zero.
    """
    return collective(_broadcasting(root_rank, process_set), tensor, name)


@untraced
@documented
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast` (without gradients)."""
    return BINDING.submit(_broadcasting(root_rank, process_set), tensor, name)


@untraced
@documented
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with ``root_rank``'s on every other rank, and return it. No gradients."""
    return BINDING.run(_broadcasting(root_rank, process_set), tensor, name, in_place=True)[0]


@untraced
@documented
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`."""
    return BINDING.submit(_broadcasting(root_rank, process_set), tensor, name, in_place=True)


# -- reducescatter ----------------------------------------------------------------------------------------------------


@untraced
@documented
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
    operation = _scattering(op, prescale_factor, postscale_factor, process_set, [tensor])
    return compressed(compression, tensor, lambda sent: collective(operation, sent, name))


@untraced
@documented
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter` (without gradients)."""
    return BINDING.submit(
        _scattering(op, prescale_factor, postscale_factor, process_set, [tensor]), tensor, name
    )


@untraced
@documented
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and divide several tensors as by :func:`reducescatter`, executed together."""
    given = arguments.tensor_list(ADAPTER, tensors)
    operation = _scattering(op, prescale_factor, postscale_factor, process_set, given)
    return all_compressed(compression, given, lambda sent: collectives(operation, sent, name))


@untraced
@documented
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter` (without gradients); ``synchronize`` gives the list of outputs."""
    given = arguments.tensor_list(ADAPTER, tensors)
    operation = _scattering(op, prescale_factor, postscale_factor, process_set, given)
    return BINDING.submit_group(operation, given, name)


# -- alltoall ---------------------------------------------------------------------------------------------------------


@untraced
@documented
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send rows to every rank, and return the rows received, in the order of the ranks they came from.

    Differentiable: gradients go back the way the rows came.

    Returns:
        The output; with ``splits`` the pair of the output and the number of rows received from each rank (int32).
    """
    output, received = exchange(_exchanging(tensor, splits, process_set), tensor, name)
    return output if splits is None else (output, received)


@untraced
@documented
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`alltoall` (without gradients); ``synchronize`` always gives the pair, as Horovod does."""
    return BINDING.submit(_exchanging(tensor, splits, process_set), tensor, name)


# -- join, and handles ------------------------------------------------------------------------------------------------


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no data left, and wait until all ranks have done so.

    Meanwhile the other ranks need not wait for this one: it takes part with zeros in their allreduces with ``hvd.Sum`` or
    ``hvd.Average`` (which divides by all ranks, those that have joined included), single, grouped or by a
    ``DistributedOptimizer``; barriers count it as present. Any other collective, and any other operator, raises
    ``HorovodInternalError`` on the ranks that submit it while some rank has joined; other collectives are not affected.

    Ranks can join any number of times, for example after each epoch of training.

    Args:
        device: Horovod's device for the zeros; has no effect, since the zeros are in host memory.
        process_set: The ranks that join; all by default.

    Returns:
        The rank that joined last, the same on all ranks: its parameters have seen the most data.

    Raises:
        AbortedError: Another rank died, failed, left or was interrupted before all had joined.
        InvalidRequestError: The process set is not registered, or this rank is not in it.
        NotInitializedError: ``init()`` was not called.
    """
    return shown_number(context.engine("hvd.join()").join(set_id(process_set)))


@untraced
def poll(handle: Handle) -> bool:
    """Return whether ``synchronize(handle)`` would return, or raise, without waiting.

    Args:
        handle: The handle that an ``*_async`` function returned.

    Returns:
        ``True`` once the collective has ended, with a result or an error.

    Raises:
        InvalidRequestError: ``handle`` is no handle.
    """
    return handles.poll(handle)


@untraced
def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective and return its result.

    Args:
        handle: The handle that an ``*_async`` function returned.

    Returns:
        The output tensor (the given one for in-place functions); for a grouped function the list of outputs; for
        ``alltoall_async`` the pair of the output and the received splits. A second call returns the same objects.

    Raises:
        InvalidRequestError: ``handle`` is no handle.
        MismatchError: The ranks disagree about the collective.
        AbortedError: It can't complete (a rank failed, left, was interrupted, ...); the group goes on.
        DuplicateNameError: Another rank submitted the collective's name twice.

    After an error the outputs, and tensors given in place, are undefined.
    """
    return handles.synchronize(handle)


# -- sparse tensors -----------------------------------------------------------------------------------------------------


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

    After a failed collective there is no output, and the given tensor is untouched.
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


# -- operations -------------------------------------------------------------------------------------------------------


def _allreducing(
    average: bool | None,
    op: ReduceOp | int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    return arguments.allreducing(average, op, prescale_factor, postscale_factor, set_id(process_set))


def _reduced(
    source: HostArray, out: HostArray, name: str | None, op: ReduceOp | int | None, process_set: ProcessSet
) -> bool:
    """Reduce the memory of a tensor by the shortest way; see :func:`reduced_at_once`."""
    chosen = Average if op is None else checked_operator(op)
    id = GLOBAL_ID if process_set is global_process_set else set_id(process_set)
    return reduced_at_once(source, out, name, chosen, id)


def _gathering(process_set: ProcessSet) -> Operation:
    return arguments.gathering(set_id(process_set))


def _broadcasting(root_rank: int, process_set: ProcessSet) -> Operation:
    return arguments.broadcasting(root_rank, set_id(process_set))


def _scattering(
    op: ReduceOp | int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    tensors: Sequence[torch.Tensor],
) -> Operation:
    return arguments.scattering(ADAPTER, tensors, op, prescale_factor, postscale_factor, set_id(process_set))


def _exchanging(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet
) -> Operation:
    return arguments.exchanging(ADAPTER, tensor, splits, set_id(process_set))

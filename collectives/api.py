"""Collectives on numpy arrays, buffers and DLPack objects, as plain functions.

Tensors may be of any layout; what is not C-contiguous is copied. Results are numpy arrays. ``name`` matches tensors
over the ranks; without one, calls are matched in order. ``process_set`` is an id, or an object with a
``process_set_id``.

All functions raise what :meth:`Handle.wait` raises, and ``UnsupportedError`` for an element type or operator that
the collective does not have. The ``*_async`` ones return an operation for :func:`synchronize` and :func:`poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import context
from hvdlab.collectives.arrays import dtype_of
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.engine.handle import Handle
from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.metrics import export_from_rank, record
from hvdlab.collectives.planes.buffers import host_view
from hvdlab.collectives.reduce.support import check_supported

Array = npt.NDArray[Any]

Average, Sum, Adasum, Min, Max, Product = (
    ReduceOp.AVERAGE,
    ReduceOp.SUM,
    ReduceOp.ADASUM,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PRODUCT,
)

metric = record.metric
export = export_from_rank.export


class Operation:
    """Collectives in flight whose results :func:`synchronize` makes into arrays."""

    __slots__ = ("_finish", "handles")

    def __init__(self, handles: list[Handle], finish: Callable[[list[Result]], Any]) -> None:
        self.handles = handles
        self._finish = finish

    def wait(self, timeout: float | None = None) -> Any:
        """Wait and return the array, or the list of arrays of a grouped call."""
        return self._finish([handle.wait(timeout) for handle in self.handles])

    def done(self) -> bool:
        return all(handle.done() for handle in self.handles)


def synchronize(operation: Operation, timeout: float | None = None) -> Any:
    """Wait for an asynchronous call and return its result.

    Raises:
        TimeoutError: It is still in flight after ``timeout`` seconds; it may be waited for again.
    """
    return operation.wait(timeout)


def poll(operation: Operation) -> bool:
    """Whether :func:`synchronize` would return, or raise, at once."""
    return operation.done()


# -- allreduce ----------------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Operation:
    """Reduce element by element over all ranks; the result has the shape and type of ``tensor``."""
    source = _Tensor(tensor)
    request = source.request(OpKind.ALLREDUCE, name, process_set)
    _reduction(request, op, prescale_factor, postscale_factor)
    return Operation([context.engine("allreduce").submit(request)], source.one)


def allreduce(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Array:
    """Like :func:`allreduce_async`, and wait."""
    source = _Tensor(tensor)
    request = source.request(OpKind.ALLREDUCE, name, process_set)
    _reduction(request, op, prescale_factor, postscale_factor)
    return source.result(context.engine("allreduce").run(request))


def allreduce_async_(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Operation:
    """Like :func:`allreduce_async`, in place: ``tensor`` gets the result, and :func:`synchronize` returns it."""
    source = _Tensor(tensor, in_place=True)
    request = source.request(OpKind.ALLREDUCE, name, process_set)
    request.output = request.input
    _reduction(request, op, prescale_factor, postscale_factor)
    return Operation([context.engine("allreduce").submit(request)], lambda results: source.write_back())


def allreduce_(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Any:
    """Like :func:`allreduce`, in place: ``tensor`` gets the result and is returned."""
    source = _Tensor(tensor, in_place=True)
    request = source.request(OpKind.ALLREDUCE, name, process_set)
    request.output = request.input
    _reduction(request, op, prescale_factor, postscale_factor)
    context.engine("allreduce").run(request)
    return source.write_back()


def grouped_allreduce_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Operation:
    """Reduce several tensors as one: none is executed before every rank has submitted all."""

    def reduction(request: Request) -> None:
        _reduction(request, op, prescale_factor, postscale_factor)

    return _grouped(OpKind.ALLREDUCE, tensors, name, process_set, reduction)


def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> list[Array]:
    """Like :func:`grouped_allreduce_async`, and wait."""
    result: list[Array] = grouped_allreduce_async(
        tensors, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


# -- allgather ----------------------------------------------------------------------------------------------------


def allgather_async(tensor: Any, name: str | None = None, process_set: Any = 0) -> Operation:
    """Concatenate the ranks' tensors along dimension 0, which may differ between ranks; the others must not."""
    source = _Tensor(tensor, rows_first=True)
    request = source.request(OpKind.ALLGATHER, name, process_set)
    return Operation([context.engine("allgather").submit(request)], source.one)


def allgather(tensor: Any, name: str | None = None, process_set: Any = 0) -> Array:
    """Like :func:`allgather_async`, and wait."""
    source = _Tensor(tensor, rows_first=True)
    request = source.request(OpKind.ALLGATHER, name, process_set)
    return source.result(context.engine("allgather").run(request))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: Any = 0
) -> Operation:
    """Gather several tensors as one group."""
    return _grouped(OpKind.ALLGATHER, tensors, name, process_set, rows_first=True)


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, process_set: Any = 0) -> list[Array]:
    """Like :func:`grouped_allgather_async`, and wait."""
    result: list[Array] = grouped_allgather_async(tensors, name, process_set).wait()
    return result


# -- broadcast ----------------------------------------------------------------------------------------------------


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = 0) -> Operation:
    """Every rank gets the tensor of ``root_rank``; shapes and types must be equal."""
    source = _Tensor(tensor)
    request = source.request(OpKind.BROADCAST, name, process_set)
    request.root = root_rank
    return Operation([context.engine("broadcast").submit(request)], source.one)


def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = 0) -> Array:
    """Like :func:`broadcast_async`, and wait."""
    source = _Tensor(tensor)
    request = source.request(OpKind.BROADCAST, name, process_set)
    request.root = root_rank
    return source.result(context.engine("broadcast").run(request))


def broadcast_(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = 0) -> Any:
    """Like :func:`broadcast`, in place: ``tensor`` gets the root's values and is returned."""
    source = _Tensor(tensor, in_place=True)
    request = source.request(OpKind.BROADCAST, name, process_set)
    request.root = root_rank
    request.output = request.input
    context.engine("broadcast").run(request)
    return source.write_back()


# -- reducescatter ------------------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Operation:
    """Reduce, then split along dimension 0: the first ``rows % size`` members get one row more than the others."""
    source = _Tensor(tensor, rows_first=True)
    request = source.request(OpKind.REDUCESCATTER, name, process_set)
    _reduction(request, op, prescale_factor, postscale_factor)
    return Operation([context.engine("reducescatter").submit(request)], source.one)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Array:
    """Like :func:`reducescatter_async`, and wait."""
    operation = reducescatter_async(tensor, name, op, prescale_factor, postscale_factor, process_set)
    result: Array = operation.wait()
    return result


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> Operation:
    """Reduce and scatter several tensors as one group."""

    def reduction(request: Request) -> None:
        _reduction(request, op, prescale_factor, postscale_factor)

    return _grouped(OpKind.REDUCESCATTER, tensors, name, process_set, reduction, rows_first=True)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = 0,
) -> list[Array]:
    """Like :func:`grouped_reducescatter_async`, and wait."""
    result: list[Array] = grouped_reducescatter_async(
        tensors, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


# -- alltoall and barrier -----------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Any, splits: Sequence[int] | None = None, name: str | None = None, process_set: Any = 0
) -> Operation:
    """Send ``splits[j]`` rows to member ``j`` (equal parts without splits).

    The result of :func:`synchronize` is the array of what came, in member order, and how many rows from each.
    """
    source = _Tensor(tensor, rows_first=True)
    request = source.request(OpKind.ALLTOALL, name, process_set)
    if splits is not None:
        request.splits = tuple(int(rows) for rows in splits)

    def finish(results: list[Result]) -> tuple[Array, tuple[int, ...]]:
        return source.result(results[0]), results[0].received_splits or ()

    return Operation([context.engine("alltoall").submit(request)], finish)


def alltoall(
    tensor: Any, splits: Sequence[int] | None = None, name: str | None = None, process_set: Any = 0
) -> tuple[Array, tuple[int, ...]]:
    """Like :func:`alltoall_async`, and wait. Returns what came, and how many rows from each member."""
    result: tuple[Array, tuple[int, ...]] = alltoall_async(tensor, splits, name, process_set).wait()
    return result


def barrier(process_set: Any = 0, name: str | None = None) -> None:
    """Return once every member has called it."""
    request = Request(OpKind.BARRIER, name, process_set=_set_id(process_set))
    context.engine("barrier").run(request)


def join(process_set: Any = 0) -> int:
    """Take part with zeros in the allreduces of the members that have data left, until all have joined.

    An average still divides by all members, and barriers count those that have joined as present. Other collectives,
    and other operators than Sum and Average, raise ``JoinedRanksError`` where they are submitted meanwhile.

    Returns:
        The rank that joined last; the same on all.
    """
    return context.engine("join").join(_set_id(process_set))


# -- arguments ----------------------------------------------------------------------------------------------------


class _Tensor:
    """A tensor as the core wants it, and how to give the result back."""

    __slots__ = ("array", "dtype", "original", "target", "view_type")

    def __init__(self, tensor: Any, *, in_place: bool = False, rows_first: bool = False) -> None:
        array = _as_array(tensor)
        self.original, self.target, self.view_type = tensor, array, None
        dtype = dtype_of(array)
        if dtype is None:
            if array.dtype.name != "bfloat16":
                raise UnsupportedError(
                    f"arrays of {array.dtype} can't be sent; convert to one of "
                    f"{', '.join(d.label for d in DType)} (in native byte order) first."
                )
            dtype, self.view_type = DType.BF16, array.dtype
        if in_place and not array.flags.writeable:
            raise InvalidRequestError("this array is read-only; the in-place call would have to write to it.")
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        if self.view_type is not None:
            array = array.view(np.uint16)
        self.array = array.reshape(1) if rows_first and array.ndim == 0 else array
        self.dtype = dtype

    def request(self, kind: OpKind, name: str | None, process_set: Any) -> Request:
        return Request(kind, name, self.array, None, self.dtype, process_set=_set_id(process_set))

    def result(self, result: Result) -> Array:
        assert result.output is not None
        output = host_view(result.output)
        return output if self.view_type is None else output.view(self.view_type)

    def one(self, results: list[Result]) -> Array:
        return self.result(results[0])

    def write_back(self) -> Any:
        """After an in-place call: the values belong into the memory that the user gave."""
        if not np.may_share_memory(self.array, self.target):
            values = self.array if self.view_type is None else self.array.view(self.view_type)
            np.copyto(self.target, values)
        return self.original


def _as_array(tensor: Any) -> Array:
    if type(tensor) is np.ndarray:
        return tensor
    if hasattr(tensor, "__dlpack__") and not isinstance(tensor, np.ndarray | np.generic):
        try:
            return np.from_dlpack(tensor)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise UnsupportedError(
                f"numpy can't take over this {type(tensor).__module__}.{type(tensor).__qualname__} ({error}); "
                "it takes CPU tensors without gradient. For torch tensors use hvdlab.torch."
            ) from error
    try:
        return np.asarray(memoryview(tensor))
    except TypeError:
        return np.asarray(tensor)


def _reduction(request: Request, op: ReduceOp, prescale: float, postscale: float) -> None:
    request.op = ReduceOp(op)
    request.prescale, request.postscale = float(prescale), float(postscale)
    check_supported(request.kind, request.dtype, request.op)


def _grouped(
    kind: OpKind,
    tensors: Sequence[Any],
    name: str | None,
    process_set: Any,
    adjust: Callable[[Request], None] | None = None,
    *,
    rows_first: bool = False,
) -> Operation:
    engine = context.engine(f"grouped_{kind.label}")
    base = name or f"grouped_{kind.label}.noname"
    sources = [_Tensor(tensor, rows_first=rows_first) for tensor in tensors]
    requests = []
    for number, source in enumerate(sources):
        request = source.request(kind, f"{base}.{number}", process_set)
        request.group, request.anonymous = (base, len(sources)), name is None
        if adjust is not None:
            adjust(request)
        requests.append(request)
    handles = engine.submit_group(requests)

    def finish(results: list[Result]) -> list[Array]:
        return [source.result(result) for source, result in zip(sources, results, strict=True)]

    return Operation(handles, finish)


def _set_id(process_set: Any) -> int:
    if isinstance(process_set, int):
        return process_set
    number = getattr(process_set, "process_set_id", None)
    if number is None:
        raise InvalidRequestError(f"{process_set!r} is no process set; give its id, or add it first.")
    return int(number)

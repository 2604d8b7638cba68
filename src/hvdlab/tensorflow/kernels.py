"""Collectives in a graph: asynchronous operations, registered with TensorFlow at run time.

A kernel submits its tensors and returns; the handle's callback finishes it, on a thread of the engine. So any number of kernels
can wait, in any order, though TensorFlow has few threads. The core reads TensorFlow's inputs and writes its outputs where they are.

The operations are registered as *stateful*, and then added to TensorFlow's list of its own asynchronous collectives. If they were
not stateful, TensorFlow would merge equal ones and fold those of constants. If they were not in the list, a function would run them
one after the other, so that ranks that have them in different orders would wait for ever.

They are registered by TensorFlow's C API for operations and kernels, which the wheel's library exports, through ctypes. ctypes keeps
the GIL during each call but that of ``run_done``, in which TensorFlow may run the operations that wait for this one.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from hvdlab.bindings.arguments import row_counts
from hvdlab.bindings.gradients import own_rows
from hvdlab.bindings.handles import Handle
from hvdlab.bindings.operations import Binding, Operation
from hvdlab.collectives import context as core
from hvdlab.collectives.context import own_number, shown_number
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import CauseKind, InvalidRequestError, NotInitializedError
from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.process_sets import check_id
from hvdlab.collectives.text import LOG
from hvdlab.collectives.types import DType, OpKind, ReduceOp, Reduction
from hvdlab.tensorflow import interrupts
from hvdlab.tensorflow.errors import to_status
from hvdlab.tensorflow.installed import internal, tf


class Unavailable(Exception):
    """This TensorFlow does not let operations be registered at run time; the message names the reason."""


def _library() -> str:
    if sys.platform != "linux":
        raise Unavailable(f"the layout of std::function is known for Linux, and this is {sys.platform}")
    return os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")


class CApi:
    """The functions of the C API that hvdlab uses, with their types.

    Raises:
        Unavailable: The library, or one of its functions, is missing.
    """

    def __init__(self) -> None:
        path = _library()
        try:
            self._held, self._released = ctypes.PyDLL(path), ctypes.CDLL(path)
        except OSError as error:
            raise Unavailable(f"TensorFlow's library can't be loaded: {error}") from None
        P, S = c_void_p, c_char_p
        f = self._function
        self.new_status, self.delete_status = f("TF_NewStatus", P), f("TF_DeleteStatus", None, P)
        self.code, self.message = f("TF_GetCode", c_int, P), f("TF_Message", S, P)
        self.set_status = f("TF_SetStatus", None, P, c_int, S)
        self.num_inputs = f("TF_NumInputs", c_int, P)
        self.get_input = f("TF_GetInput", None, P, c_int, POINTER(P), P)
        self.allocate_output = f(
            "TF_AllocateOutput", P, P, c_int, c_int, POINTER(c_int64), c_int, c_size_t, P
        )
        self.delete_tensor = f("TF_DeleteTensor", None, P)
        self.tensor_type, self.num_dims = f("TF_TensorType", c_int, P), f("TF_NumDims", c_int, P)
        self.dim, self.data = f("TF_Dim", c_int64, P, c_int), f("TF_TensorData", P, P)
        self.byte_size = f("TF_TensorByteSize", c_size_t, P)
        self.fail = f("TF_OpKernelContext_Failure", None, P, P)
        self.run_done = f("TF_RunAsyncOpKernelDoneCallback", None, P, library=self._released)
        self.attr_size = f(
            "TF_OpKernelConstruction_GetAttrSize", None, P, S, POINTER(c_int), POINTER(c_int), P
        )
        self.attr_string = f("TF_OpKernelConstruction_GetAttrString", None, P, S, P, c_size_t, P)
        self.construction_fails = f("TF_OpKernelConstruction_Failure", None, P, P)
        self.new_shape, self.delete_shape = f("TF_NewShapeHandle", P), f("TF_DeleteShapeHandle", None, P)
        self.shape_inputs = f("TF_ShapeInferenceContextNumInputs", c_int64, P)
        self.shape_input = f("TF_ShapeInferenceContextGetInput", None, P, c_int, P, P)
        self.shape_output = f("TF_ShapeInferenceContextSetOutput", None, P, c_int, P, P)
        self.unknown_shape = f("TF_ShapeInferenceContextSetUnknownShape", None, P, P)
        self.shape_scalar = f("TF_ShapeInferenceContextScalar", P, P)
        self.new_definition = f("TF_NewOpDefinitionBuilder", P, S)
        self.add_attr = f("TF_OpDefinitionBuilderAddAttr", None, P, S)
        self.add_input = f("TF_OpDefinitionBuilderAddInput", None, P, S)
        self.add_output = f("TF_OpDefinitionBuilderAddOutput", None, P, S)
        self.set_stateful = f("TF_OpDefinitionBuilderSetIsStateful", None, P, c_bool)
        self.set_shape_function = f("TF_OpDefinitionBuilderSetShapeInferenceFunction", None, P, P)
        self.register_definition = f("TF_RegisterOpDefinition", None, P, P)
        self.new_kernel = f("TF_NewAsyncKernelBuilder", P, S, S, P, P, P)
        self.host_memory = f("TF_KernelBuilder_HostMemory", None, P, S)
        self.register_kernel = f("TF_RegisterKernelBuilder", None, S, P, P)

    def _function(self, name: str, result: Any, *arguments: Any, library: Any = None) -> Any:
        try:
            function = getattr(library or self._held, name)
        except AttributeError:
            raise Unavailable(f"TensorFlow's library has no {name}") from None
        function.restype, function.argtypes = result, arguments
        return function

    def check(self, status: int) -> None:
        """Raise ``RuntimeError`` with TensorFlow's message if a status is not OK."""
        if self.code(status):
            raise RuntimeError(self.message(status).decode(errors="replace"))


# -- std::function<void()> --------------------------------------------------------------------------------------------

_FUNCTION_BYTES, _MANAGER, _INVOKER, _DESTROY = 32, 16, 24, 3
"""libstdc++'s ``std::function`` has 32 bytes: 16 for the functor, then the manager and the invoker. The manager destroys the functor
when it is called with the operation 3."""

_clone_or_destroy = CFUNCTYPE(c_bool, c_void_p, c_void_p, c_int)


@cache
def _manager(address: int) -> Any:
    """Return a manager as a Python function. TensorFlow's executor has only a few, so all of them are kept."""
    return _clone_or_destroy(address)


class KernelDone:
    """The callback that an asynchronous kernel has to call when it has finished; owns a ``std::function<void()>``.

    TensorFlow gives the kernel a pointer to a function that is destroyed when the kernel returns. So this object moves the function
    out of there, as libstdc++'s move constructor does: it copies the bytes, and leaves the original empty.

    Args:
        api: TensorFlow's functions.
        pointer: The address of the ``std::function``.
    """

    def __init__(self, api: CApi, pointer: int) -> None:
        self._api = api
        self._buffer = ctypes.create_string_buffer(_FUNCTION_BYTES)
        ctypes.memmove(self._buffer, pointer, _FUNCTION_BYTES)
        ctypes.memset(pointer + _MANAGER, 0, _FUNCTION_BYTES - _MANAGER)

    def __call__(self) -> None:
        """Run the function and destroy it. Must be called exactly once."""
        address = ctypes.addressof(self._buffer)
        manager = ctypes.c_size_t.from_buffer(self._buffer, _MANAGER).value
        self._api.run_done(address)
        _manager(manager)(address, address, _DESTROY)


def is_function(pointer: int) -> bool:
    """Return whether there are pointers to code at this address where libstdc++'s ``std::function`` has them."""
    found = (ctypes.c_uint64 * (_FUNCTION_BYTES // 8)).from_address(pointer)
    addresses = [found[_MANAGER // 8], found[_INVOKER // 8]]
    with open("/proc/self/maps") as maps:
        for line in maps:
            area, permissions = line.split()[:2]
            if "x" in permissions:
                start, end = (int(number, 16) for number in area.split("-"))
                addresses = [address for address in addresses if not start <= address < end]
    return not addresses


class Call(NamedTuple):
    """A collective that an operation in a graph runs whenever it is executed.

    Attributes:
        operation: The collective.
        name: Its name; ``None`` if the ranks' calls are matched in order.
        grouped: Whether the tensors are a group, however many they are.
        site: The user's line of code that made the operation, for error texts and the timeline.
    """

    operation: Operation
    name: str | None
    grouped: bool
    site: str

    def encoded(self) -> bytes:
        """Return the call as the value of the operation's attribute."""
        kind, reduction, root, process_set, _ = self.operation  # splits are an input
        operation = [kind, *reduction, root, process_set]
        return msgspec.json.encode([operation, self.name, self.grouped, self.site])


def decoded(value: bytes | str) -> Call:
    """Return the call in a value that :meth:`Call.encoded` made."""
    (kind, op, prescale, postscale, root, process_set), name, grouped, site = msgspec.json.decode(value)
    reduction = Reduction(ReduceOp(op), float(prescale), float(postscale))
    operation = Operation(OpKind(kind), reduction, root, process_set)
    return Call(operation, name, grouped, site)


TYPES = {dtype: tf.dtypes.as_dtype(dtype.label) for dtype in DType}
"""TensorFlow's type for each type of the core."""

_NUMBERS = {dtype: int(kind.as_datatype_enum) for dtype, kind in TYPES.items()}
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}
_LIST = (
    "T: list({"
    + ", ".join(
        {"float16": "half", "float32": "float", "float64": "double"}.get(d.label, d.label) for d in DType
    )
    + "}) >= 1"
)

OPS = {
    OpKind.ALLREDUCE: "HvdlabAllreduce",
    OpKind.ALLGATHER: "HvdlabAllgather",
    OpKind.BROADCAST: "HvdlabBroadcast",
    OpKind.REDUCESCATTER: "HvdlabReducescatter",
    OpKind.ALLTOALL: "HvdlabAlltoall",
    OpKind.JOIN: "HvdlabJoin",
}
"""Names of the operations. A group is one operation with several tensors."""

QUERY = "HvdlabQuery"
"""Name of the operation whose output is a number such as the size of the world at the time of its execution."""

_KEEPS_SHAPE = (OpKind.ALLREDUCE, OpKind.BROADCAST)


# -- tensors ----------------------------------------------------------------------------------------------------------


class KernelTensor:
    """An input of a kernel, or the output in the same place.

    Attributes:
        array: Its memory, in the core's storage type.
        dtype: Its element type.
        place: Index of the output that belongs to it.
        execution: The execution of the kernel.
    """

    __slots__ = ("array", "dtype", "execution", "place")

    def __init__(self, array: npt.NDArray[Any], dtype: DType, place: int, execution: Execution) -> None:
        self.array = array
        self.dtype = dtype
        self.place = place
        self.execution = execution


class KernelAdapter:
    """Adapter of kernels' tensors; see :class:`hvdlab.bindings.adapter.FrameworkAdapter`."""

    def check(self, value: Any, kind: OpKind, in_place: bool) -> KernelTensor:
        tensor: KernelTensor = value
        return tensor

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, KernelTensor)

    def dtype(self, tensor: KernelTensor) -> DType:
        return tensor.dtype

    def shape(self, tensor: KernelTensor) -> tuple[int, ...]:
        return tensor.array.shape

    def is_direct(self, tensor: KernelTensor) -> bool:
        return True

    def host_view(self, tensor: KernelTensor) -> npt.NDArray[Any]:
        return tensor.array

    def stage(self, tensor: KernelTensor) -> KernelTensor:
        copy = self.empty_like(tensor)
        np.copyto(copy.array, tensor.array)
        return copy

    def empty_like(self, tensor: KernelTensor) -> KernelTensor:
        return self.empty(tensor.array.shape, tensor)

    def empty(self, shape: tuple[int, ...], like: KernelTensor) -> KernelTensor:
        array = like.execution.allocate(like.place, like.dtype, shape)
        return KernelTensor(array, like.dtype, like.place, like.execution)

    def deliver(self, output: KernelTensor, into: KernelTensor) -> None:
        raise AssertionError("kernels write to outputs only")

    def placed(self, output: KernelTensor, like: KernelTensor) -> KernelTensor:
        return output

    def mark_written(self, tensor: KernelTensor) -> None:
        raise AssertionError("kernels write to outputs only")

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        return False

    def received_splits(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return counts


_BINDING: Binding[KernelTensor] = Binding(KernelAdapter())


# -- an execution -----------------------------------------------------------------------------------------------------


class Execution:
    """One execution of a kernel, from its start until :meth:`end` reports to TensorFlow that it has finished.

    Args:
        api: TensorFlow's functions.
        context: TensorFlow's ``TF_OpKernelContext``, valid until the end.
        done: TensorFlow's callback, which :meth:`end` calls.
    """

    __slots__ = ("_api", "_context", "_done", "_lock", "_status", "_tensors")

    def __init__(self, api: CApi, context: int, done: KernelDone) -> None:
        self._api, self._context, self._done = api, context, done
        self._status = api.new_status()
        #: The inputs and outputs whose memory the core may use; :meth:`end` releases them.
        self._tensors: list[int] = []
        #: Guards the status and the tensors in :meth:`allocate`.
        self._lock = threading.Lock()

    def inputs(self) -> list[KernelTensor]:
        """Return all inputs, as views of TensorFlow's memory."""
        api = self._api
        found = []
        for place in range(api.num_inputs(self._context)):
            tensor = c_void_p()
            api.get_input(self._context, place, byref(tensor), self._status)
            api.check(self._status)
            assert tensor.value is not None
            self._tensors.append(tensor.value)
            shape = tuple(api.dim(tensor, number) for number in range(api.num_dims(tensor)))
            dtype = _DTYPES[api.tensor_type(tensor)]
            found.append(KernelTensor(self._view(tensor.value, dtype, shape), dtype, place, self))
        return found

    def allocate(self, place: int, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Allocate an output, and return a view of its memory. Any thread."""
        api, kind = self._api, storage_type(dtype)
        size = math.prod(shape) * kind.itemsize
        with self._lock:  # the tensors of a group may be executed at the same time
            tensor = api.allocate_output(
                self._context,
                place,
                _NUMBERS[dtype],
                (c_int64 * len(shape))(*shape),
                len(shape),
                size,
                self._status,
            )
            api.check(self._status)
            self._tensors.append(tensor)
        return self._view(tensor, dtype, shape)

    def _view(self, tensor: int, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        kind, size = storage_type(dtype), self._api.byte_size(tensor)
        if not size:
            return np.empty(shape, kind)
        memory = (ctypes.c_char * size).from_address(self._api.data(tensor))
        return np.ndarray(shape, kind, memory)

    def end(self, error: BaseException | None = None) -> None:
        """Finish the execution, with an error if there is one. Must be called exactly once. Any thread.

        The core must be done with the inputs and outputs: TensorFlow may free their memory from now on.
        """
        api = self._api
        if error is not None:
            code, text = to_status(error)
            api.set_status(self._status, code, text.encode())
            api.fail(self._context, self._status)
        tensors, self._tensors = self._tensors, []
        for tensor in tensors:
            api.delete_tensor(tensor)
        api.delete_status(self._status)
        # Last: TensorFlow's context is not valid any more after this call.
        self._done()


def _run(execution: Execution, call: Call) -> None:
    """Submit the collective of a kernel, whose callback ends the execution. If this raises, the caller has to end it.

    It raises before the core has the tensors only, but for Ctrl-C within the submission itself.
    """
    operation, kind = call.operation, call.operation.kind
    if kind is OpKind.JOIN:
        _join(execution, call)
        return
    tensors = execution.inputs()
    if kind is OpKind.ALLTOALL:
        splits = tensors.pop().array
        operation = operation._replace(splits=row_counts(splits) if splits.size else None)
    if kind in (OpKind.ALLTOALL, OpKind.REDUCESCATTER) and any(not each.array.shape for each in tensors):
        raise InvalidRequestError(f"{kind.label} splits dimension 0, which a 0-d tensor does not have.")
    # If no other kernel waits, this thread announces the collective itself, which costs less than to wake the control thread.
    # Otherwise the control thread announces it, together with others that come meanwhile.
    alone, engine = interrupts.idle(), core.engine(kind.label)
    interrupts.expect()
    try:
        if call.grouped:
            handle = _BINDING.submit_group(operation, tensors, call.name, announce=not alone, site=call.site)
        else:
            handle = _BINDING.submit(operation, tensors[0], call.name, announce=not alone, site=call.site)
    except BaseException:
        interrupts.failed()
        raise
    count, unended, struck = len(tensors), [execution], list[BaseException]()

    def finished(handle: Handle) -> None:
        # Before the execution ends, in which TensorFlow may run the next kernels: these ask whether any other
        # waits.
        interrupts.ended(handle)
        try:
            ending = unended.pop()
        except IndexError:
            return  # added twice, see _finish_later()
        failure: BaseException | None = None
        try:
            outputs = handle.wait()
            if kind is OpKind.ALLGATHER:
                _give(ending, count, DType.I64, own_rows(handle.tables, operation.process_set))
            elif kind is OpKind.ALLTOALL:
                _give(ending, count, DType.I32, outputs[1])
        except BaseException as error:  # noqa: BLE001  # the user gets it from the operation
            failure = error
        ending.end(struck[0] if struck else failure)

    watched = False
    try:
        # Before the callback, which can run at once and report the end.
        interrupts.started(handle, operation.process_set)
        watched = True
        handle.add_done_callback(finished)
        if alone:
            engine.flush()
    except BaseException as error:  # noqa: BLE001  # the user gets it from the operation
        # Not raised: the caller would end the execution while the core uses its memory, or for a second time.
        struck.append(error)
        if not watched:
            interrupts.failed()
        _finish_later(handle, finished, operation.process_set)


def _finish_later(handle: Handle, finished: Callable[[Handle], None], process_set: int) -> None:
    """Withdraw a collective at whose start Ctrl-C has struck, and have its execution ended once the core has let go of it."""
    while True:
        try:
            # Perhaps a second time: the interrupt has left open whether it is there.
            handle.add_done_callback(finished)
            engine = core.engine()
            engine.withdraw(f"rank {engine.rank} was interrupted", process_set, CauseKind.INTERRUPTED)
        except KeyboardInterrupt:
            continue
        except NotInitializedError:
            pass  # hvdlab was shut down, which has ended it
        return


def _give(execution: Execution, place: int, dtype: DType, values: Any) -> None:
    array = np.asarray(values, storage_type(dtype))
    np.copyto(execution.allocate(place, dtype, array.shape), array)


def _join(execution: Execution, call: Call) -> None:
    def finished(result: Any, error: Exception | None, /) -> None:
        try:
            if error is None:
                _give(execution, 0, DType.I32, shown_number(result.last_joined))
        except BaseException as failure:  # noqa: BLE001  # the user gets it from the operation
            execution.end(failure)
        else:
            execution.end(error)

    request = Request(OpKind.JOIN, process_set=call.operation.process_set, site=call.site, on_done=finished)
    core.engine("hvd.join()").submit(request)


# -- callbacks --------------------------------------------------------------------------------------------------------

SELF_TEST = b"self-test"
"""The call of the operation that :meth:`Registered.works` runs."""
_QUERIES = {
    "size": lambda process_set: len(_members(process_set)),
    "rank": lambda process_set: own_number("hvd.rank_op()"),
    "local_size": lambda process_set: core.engine("hvd.local_size_op()").local_size,
    "local_rank": lambda process_set: core.engine("hvd.local_rank_op()").local_rank,
    "included": lambda process_set: int(core.engine().rank in _members(process_set)),
}


def _members(process_set: int) -> tuple[int, ...]:
    check_id(process_set, "hvd.size_op()")
    return core.engine().ranks(process_set)


def asked(what: str, process_set: int) -> int:
    """Return a number about the world or a process set: ``size``, ``rank``, ``local_size``, ``local_rank`` or ``included`` (0 or 1).

    Raises:
        NotInitializedError: ``init()`` was not called.
        InvalidRequestError: There is no such process set.
    """
    return _QUERIES[what](process_set)


class _KeptThread(threading.local):
    """Keeper of the interpreter's state of the calling thread, once it is asked in it.

    A callback on a thread of TensorFlow's own begins with making that state and ends with dropping it, which takes 35 µs of processor time, unless
    another owner holds it. It is never released here: TensorFlow's threads live as long as the process.
    """

    def __init__(self) -> None:  # once in each thread
        ctypes.pythonapi.PyGILState_Ensure()
        self.is_kept = True


class _Kernels:
    """The callbacks that TensorFlow calls, and the collectives of the kernels that it has made."""

    def __init__(self, api: CApi) -> None:
        self._api = api
        self._numbers = itertools.count(1)
        #: The attribute of each kernel, encoded, by the kernel's number. TensorFlow may use a number as long as the process lives,
        #: even after the interpreter's end, so nothing is ever removed; kernels with equal attributes share a number.
        self._calls: dict[int, bytes] = {}
        self._numbers_of: dict[bytes, int] = {}
        #: The decoded collectives of the kernels that have been executed.
        self._decoded: dict[int, Call] = {}
        #: Keeps the interpreter's state of each thread of TensorFlow's that calls these.
        self._thread = _KeptThread()
        #: Whether the self-test found TensorFlow's callback to have the layout that :class:`KernelDone` expects; ``None`` before it.
        self.tested: bool | None = None
        #: C's entries to the methods, which must exist as long as TensorFlow can call them: until the process
        #: ends.
        self.create = CFUNCTYPE(c_void_p, c_void_p)(self._create)
        self.compute = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(self._compute)
        self.same_shapes = CFUNCTYPE(None, c_void_p, c_void_p)(self._same_shapes)
        self.unknown_shapes = CFUNCTYPE(None, c_void_p, c_void_p)(self._unknown_shapes)
        self.scalar = CFUNCTYPE(None, c_void_p, c_void_p)(self._scalar)

    def _create(self, construction: int) -> int:
        api, size, total = self._api, c_int(), c_int()
        status = api.new_status()
        api.attr_size(construction, b"call", byref(size), byref(total), status)
        text = ctypes.create_string_buffer(max(0, total.value) + 1)
        api.attr_string(construction, b"call", text, max(0, total.value), status)
        if api.code(status):
            api.construction_fails(construction, status)
        api.delete_status(status)
        number = self._numbers_of.get(text.value)
        if number is None:
            number = next(self._numbers)
            self._calls[number], self._numbers_of[text.value] = text.value, number
        return number

    def _compute(self, kernel: int, context: int, done: int) -> None:
        assert self._thread.is_kept
        known = self._decoded.get(kernel)
        if known is not None:
            self._start(known, context, done)
            return
        call = self._calls[kernel]
        if call == SELF_TEST and not is_function(done):
            self.tested = False
            self._api.run_done(done)
            return
        execution = Execution(self._api, context, KernelDone(self._api, done))
        try:
            if call == SELF_TEST:
                self._echo(execution)
            elif call.startswith(b"?"):
                what, _, process_set = call[1:].decode().partition(" ")
                _give(execution, 0, DType.I32, asked(what, int(process_set)))
                execution.end()
            else:
                known = self._decoded[kernel] = decoded(call)
                _run(execution, known)
        except BaseException as error:  # noqa: BLE001  # must not leave a callback of C
            execution.end(error)

    def _start(self, call: Call, context: int, done: int) -> None:
        execution = Execution(self._api, context, KernelDone(self._api, done))
        try:
            _run(execution, call)
        except BaseException as error:  # noqa: BLE001  # must not leave a callback of C
            execution.end(error)

    def _echo(self, execution: Execution) -> None:
        """Copy the input to the output for the self-test, and end on another thread, after this callback has returned."""
        (tensor,) = execution.inputs()

        def finish() -> None:
            _BINDING.adapter.stage(tensor)
            self.tested = True
            execution.end()

        threading.Timer(0.01, finish).start()

    def _same_shapes(self, context: int, status: int) -> None:
        api = self._api
        for number in range(api.shape_inputs(context)):
            handle = api.new_shape()
            api.shape_input(context, number, handle, status)
            api.shape_output(context, number, handle, status)
            api.delete_shape(handle)

    def _unknown_shapes(self, context: int, status: int) -> None:
        self._api.unknown_shape(context, status)

    def _scalar(self, context: int, status: int) -> None:
        handle = self._api.shape_scalar(context)
        self._api.shape_output(context, 0, handle, status)
        self._api.delete_shape(handle)


# -- registration -----------------------------------------------------------------------------------------------------

_OUTPUTS = {
    OpKind.ALLGATHER: ("outputs: T", "places: int64"),
    OpKind.ALLTOALL: ("output: T", "received: int32"),
    OpKind.JOIN: ("last: int32",),
}


class Registered:
    """Registration of the operations. It makes the Python functions, such as ``hvdlab_allreduce``, that put them into graphs.

    Attributes:
        functions: A module with these functions.

    Raises:
        Unavailable: This TensorFlow lacks a needed part; the message names it.
    """

    def __init__(self) -> None:
        self._api = CApi()
        try:
            self._wrappers = internal("framework._pywrap_python_op_gen").GetPythonWrappers
            self._dependencies = internal("framework.auto_control_deps")
            self._dependencies.ASYNC_STATEFUL_OPS  # noqa: B018  # it may be missing
            self._definitions = internal("framework.op_def_registry")
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"TensorFlow has no {error}") from None
        self._kernels = _Kernels(self._api)
        names = [*OPS.values(), QUERY]
        for kind, name in OPS.items():
            self._register(name, kind)
        self._register(QUERY, None)
        self._dependencies.ASYNC_STATEFUL_OPS = self._dependencies.ASYNC_STATEFUL_OPS | set(OPS.values())
        self.functions = self._functions(names)

    def _register(self, name: str, kind: OpKind | None) -> None:
        api, kernels = self._api, self._kernels
        inputs: tuple[str, ...] = ("tensors: T",)
        outputs: tuple[str, ...] = ("outputs: T",)
        if kind is None or kind is OpKind.JOIN:
            inputs, outputs = (), ("number: int32",)
        elif kind is OpKind.ALLTOALL:
            inputs = ("tensor: T", "splits: int32")
        outputs = _OUTPUTS.get(kind, outputs) if kind is not None else outputs
        builder = api.new_definition(name.encode())
        if inputs:
            attr = _LIST if kind is not OpKind.ALLTOALL else _LIST.replace("list(", "").replace(") >= 1", "")
            api.add_attr(builder, attr.encode())
        api.add_attr(builder, b"call: string")
        for spec in inputs:
            api.add_input(builder, spec.encode())
        for spec in outputs:
            api.add_output(builder, spec.encode())
        api.set_stateful(builder, True)
        if not inputs:
            shapes = kernels.scalar
        else:
            shapes = kernels.same_shapes if kind in _KEEPS_SHAPE else kernels.unknown_shapes
        api.set_shape_function(builder, ctypes.cast(shapes, c_void_p))
        status = api.new_status()
        api.register_definition(builder, status)
        self._check(status)
        create, compute = (ctypes.cast(f, c_void_p) for f in (kernels.create, kernels.compute))
        for device in (b"CPU", b"GPU"):  # for a GPU, TensorFlow copies to and from the host
            builder = api.new_kernel(name.encode(), device, create, compute, None)
            if device == b"GPU":
                for spec in (*inputs, *outputs):
                    api.host_memory(builder, spec.partition(":")[0].encode())
            api.register_kernel(name.encode(), builder, status)
            self._check(status)
        api.delete_status(status)

    def _check(self, status: int) -> None:
        try:
            self._api.check(status)
        except RuntimeError as error:
            raise Unavailable(str(error)) from None

    def _functions(self, names: list[str]) -> Any:
        """Generate the functions, as ``tf.load_op_library`` does for the operations of a library."""
        messages: Any = importlib.import_module("tensorflow.core.framework.op_def_pb2")
        definitions = messages.OpList(op=[self._definitions.get(name) for name in names])
        module: Any = type(sys)("hvdlab.tensorflow.generated")
        module.__dict__["_IS_TENSORFLOW_PLUGIN"] = True
        sys.modules[module.__name__] = module
        exec(self._wrappers(definitions.SerializeToString()), module.__dict__)  # noqa: S102
        return module

    def works(self) -> bool:
        """Return whether an operation runs and ends as it should. The first call runs one, as a self-test."""
        if self._kernels.tested is None:
            try:
                with tf.init_scope(), tf.Graph().as_default(), tf.device("CPU"):
                    (echo,) = self.functions.hvdlab_broadcast([tf.constant([1, 2])], call=SELF_TEST)
                    with tf.compat.v1.Session() as session:
                        found = session.run(echo).tolist()
                self._kernels.tested = bool(self._kernels.tested) and found == [1, 2]
            except tf.errors.OpError as error:
                LOG.debug("the self-test of TensorFlow operations failed: %s", error)
                self._kernels.tested = False
        return bool(self._kernels.tested)


@cache
def registered() -> Registered | str:
    """Return the operations of this process, registered by the first call; or a text on why there are none."""
    try:
        return Registered()
    except Unavailable as error:
        return str(error)


def usable() -> Registered | str:
    """Return the operations, after the self-test; or a text on why they can't be used."""
    found = registered()
    if isinstance(found, str) or found.works():
        return found
    return "its operations do not end as they should: the layout of its std::function is another one"

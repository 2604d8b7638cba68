"""The arrays of frameworks, for key-value stores. A framework is used only where the program has imported it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.kvstore.arrays import ArrayType, FrameworkRows, RowSparse, register_array_type, write

Array = npt.NDArray[Any]


def _is(module: str, *names: str) -> Any:
    """Return whether an object is of one of these classes of a module, which is never imported here."""

    def matches(value: Any) -> bool:
        found = sys.modules.get(module)
        classes = tuple(getattr(found, name) for name in names if hasattr(found, name))
        return isinstance(value, classes)

    return matches


def _view_torch(tensor: Any) -> Array:
    try:
        array: Array = tensor.detach().resolve_conj().resolve_neg().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"numpy has no arrays of {tensor.dtype} on {tensor.device}: {error}") from error
    return array


def _write_torch(tensor: Any, array: Array) -> None:
    torch = sys.modules["torch"]
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.array(array)))


def _wrap_torch(array: Array) -> Any:
    return sys.modules["torch"].from_numpy(array)


def _view_cupy(array: Any) -> Array:
    host: Array = array.get()
    return host


def _write_cupy(target: Any, array: Array) -> None:
    target.set(np.ascontiguousarray(array.astype(target.dtype)))


def _wrap_cupy(array: Array) -> Any:
    return sys.modules["cupy"].asarray(array)


def _view_tensorflow(tensor: Any) -> Array:
    return np.asarray(tensor.numpy())


def _write_tensorflow(target: Any, array: Array) -> None:
    if not hasattr(target, "assign"):
        raise TypeError("a tf.Tensor can't be written to: give a tf.Variable or a numpy array as output")
    target.assign(array.astype(target.dtype.as_numpy_dtype))


def _wrap_tensorflow(array: Array) -> Any:
    return sys.modules["tensorflow"].Variable(array)


def mxnet_memory(array: Any) -> Array:
    """Return the memory of a dense NDArray on the CPU, which MXNet 1.9.1 gives by no protocol.

    The caller has waited for the operations on it that are in flight. The view keeps the array alive.
    """
    library = sys.modules["mxnet"].base._LIB
    address = ctypes.c_void_p()
    if library.MXNDArrayGetData(array.handle, ctypes.byref(address)) != 0:
        raise TypeError("MXNet does not give the memory of this array")
    dtype = np.dtype(array.dtype)
    if not array.size:
        return np.empty(array.shape, dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address.value or 0)
    memory.array = array  # the view keeps the memory alive
    return np.frombuffer(memory, dtype).reshape(array.shape)


def wait_to_write_mxnet(array: Any) -> None:
    """Wait until no operation of MXNet's reads or writes an NDArray. An exception of such an operation is raised here."""
    base = sys.modules["mxnet"].base
    base.check_call(base._LIB.MXNDArrayWaitToWrite(array.handle))


def _on_cpu(array: Any) -> bool:
    return bool(array.context.device_type.startswith("cpu"))


def _view_mxnet(array: Any) -> Array:
    if array.stype != "default":
        raise TypeError(f"a {array.stype} array is not dense")
    if not _on_cpu(array):
        host: Array = array.asnumpy()
        return host
    # The view is read past MXNet, whose threads have perhaps not computed the array yet.
    array.wait_to_read()
    return mxnet_memory(array)


def _write_mxnet(target: Any, array: Array) -> None:
    if target.stype != "default":
        raise TypeError(f"a {target.stype} array is not dense")
    if not _on_cpu(target):
        target[:] = sys.modules["mxnet"].nd.array(array, dtype=array.dtype)
        return
    # Operations in flight on MXNet's threads would otherwise read the new values, or overwrite them.
    wait_to_write_mxnet(target)
    write(mxnet_memory(target), array)


def _wrap_mxnet(array: Array) -> Any:
    return sys.modules["mxnet"].nd.array(array, dtype=array.dtype)


class MxnetRows(FrameworkRows):
    """Row-sparse array of MXNet as one of ours, which writes the rows that replace its own to MXNet's.

    Args:
        array: MXNet's.
    """

    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        super().__init__(array.data.asnumpy(), array.indices.asnumpy(), array.shape, MXNET)
        self._array = array

    def replace(self, indices: npt.NDArray[np.int64], data: Array) -> None:
        super().replace(indices, data)
        _write_rows_mxnet(self, self._array)


def _rows_mxnet(array: Any) -> RowSparse | None:
    if array.stype != "row_sparse":
        return None
    return MxnetRows(array)


def _write_rows_mxnet(rows: RowSparse, target: Any) -> None:
    with sys.modules["mxnet"].autograd.pause():  # Gluon asks for rows in the middle of a forward pass
        _wrap_rows_mxnet(rows).copyto(target)


def _wrap_rows_mxnet(rows: RowSparse) -> Any:
    sparse = sys.modules["mxnet"].nd.sparse
    if not len(rows.indices):
        return sparse.zeros("row_sparse", rows.shape, dtype=rows.dtype)
    return sparse.row_sparse_array((rows.data, rows.indices), shape=rows.shape, dtype=rows.dtype)


MXNET = ArrayType(
    "mxnet",
    _is("mxnet.ndarray", "NDArray"),
    _view_mxnet,
    _write_mxnet,
    _wrap_mxnet,
    _wrap_rows_mxnet,
    _rows_mxnet,
)


def register_frameworks() -> None:
    """Let the stores accept arrays of torch, TensorFlow, cupy and MXNet.

    Tensors on other devices are copied through host memory. Views of CPU tensors of torch and MXNet share their memory.
    """
    register_array_type(ArrayType("torch", _is("torch", "Tensor"), _view_torch, _write_torch, _wrap_torch))
    register_array_type(ArrayType("cupy", _is("cupy", "ndarray"), _view_cupy, _write_cupy, _wrap_cupy))
    register_array_type(
        ArrayType(
            "tensorflow",
            _is("tensorflow", "Tensor", "Variable"),
            _view_tensorflow,
            _write_tensorflow,
            _wrap_tensorflow,
        )
    )
    register_array_type(MXNET)

"""TensorFlow's C API for operations and kernels, which the wheel's library exports, through ctypes.

ctypes keeps the GIL during each call but that of ``run_done``, in which TensorFlow may run the operations that wait for this one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

from hvdlab.tensorflow.installed import tf


class Unavailable(Exception):
    """This TensorFlow does not let operations be registered at run time; the text says why."""


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
    """A manager as a Python function. TensorFlow's executor has only a few, so all of them are kept."""
    return _clone_or_destroy(address)


class Done:
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
    """Whether there are pointers to code at this address where libstdc++'s ``std::function`` has them."""
    found = (ctypes.c_uint64 * (_FUNCTION_BYTES // 8)).from_address(pointer)
    addresses = [found[_MANAGER // 8], found[_INVOKER // 8]]
    with open("/proc/self/maps") as maps:
        for line in maps:
            area, permissions = line.split()[:2]
            if "x" in permissions:
                start, end = (int(number, 16) for number in area.split("-"))
                addresses = [address for address in addresses if not start <= address < end]
    return not addresses

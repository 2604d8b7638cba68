"""A GPU by way of CUDA's driver and NVIDIA's compiler for running programs (NVRTC).

The driver is present wherever a GPU is; no toolkit and no framework is needed. The compiler comes with torch's builds for CUDA and with
``hvdlab[gpu]``. So ``kernels.cu`` ships as source, and its code is made for the present GPU, when it is first needed. Compiling takes
a fraction of a second, only in the processes of workers (:mod:`ipc_group`), once for each type of elements and operator.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from importlib.resources import files
from time import monotonic_ns
from types import TracebackType
from typing import Any

from cuda.bindings import driver, nvrtc

from hvdlab.collectives.planes.gpu.device import Allocation, DeviceFailed, KernelLaunch, OpenedPieces
from hvdlab.collectives.types import DType, ReduceOp

_SOON = 60_000
"""Nanoseconds for which a thread that waits for an event offers its core to others before it sleeps: about the cost of sleeping and waking."""
_THREADS = 256  # of a block, as in kernels.cu
_BLOCKS = 8  # on each multiprocessor: then loads of some hide the waits of others
_TYPES = (
    ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_double, ctypes.c_double,
    ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64,
)  # fmt: skip
_OWNER = secrets.randbits(64)
_OK = driver.CUresult.CUDA_SUCCESS
_FATAL = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})
"""The driver's numbers of errors after which a process can't use the GPU any more: a kernel executed a forbidden instruction or access, ran too long, or memory failed."""
_NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
_SOURCE = "kernels.cu"
_NVRTC_OK = nvrtc.nvrtcResult.NVRTC_SUCCESS

ELEMENTS = {
    DType.U8: "Integer<u8>",
    DType.I8: "Integer<signed char>",
    DType.I16: "Integer<short>",
    DType.I32: "Integer<int>",
    DType.I64: "Integer<long long>",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.F32: "F32",
    DType.F64: "F64",
}
"""The structs of ``kernels.cu``, by the types that they reduce."""


class CudaGpus:
    """See :class:`~hvdlab.collectives.planes.gpu.gpu_plane.Gpus`."""

    def __init__(self) -> None:
        self._opened: dict[int, CudaDevice] = {}
        self._guard = threading.Lock()

    def why_unusable(self) -> str | None:
        # The compiler's version as well: a driver that is older would refuse its code, and the first collective would fail.
        try:
            needed = compiler_version()
            found = _checked(driver.cuInit(0), driver.cuDriverGetVersion()) // 1000
            if found < needed:
                return f"The driver is for CUDA {found}, and the compiler of kernels (nvidia-cuda-nvrtc) for CUDA {needed}."
            if not _checked(driver.cuDeviceGetCount()):
                return "CUDA's driver sees no GPU (CUDA_VISIBLE_DEVICES may hide it)."
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
            if not _checked(driver.cuDeviceGetAttribute(attribute, 0)):
                return "The GPU can't read memory of the host that processes share."
        except (DeviceFailed, RuntimeError) as error:  # the bindings raise RuntimeError without a driver
            return f"CUDA's driver can't be used: {error}"
        return None

    def count(self) -> int:
        return int(_checked(driver.cuInit(0), driver.cuDeviceGetCount()))

    def open(self, ordinal: int) -> CudaDevice:
        with self._guard:
            found = self._opened.get(ordinal)
            if found is None:
                found = self._opened[ordinal] = CudaDevice(ordinal)
            return found

    def used_ordinal(self) -> int:
        _checked(driver.cuInit(0))
        for ordinal in range(_checked(driver.cuDeviceGetCount())):
            _, active = _checked(driver.cuDevicePrimaryCtxGetState(_checked(driver.cuDeviceGet(ordinal))))
            if active:
                return ordinal
        return 0

    def ordinal_of(self, pointer: int) -> int:
        _checked(driver.cuInit(0))
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(_checked(driver.cuPointerGetAttribute(attribute, pointer)))


def _checked(*results: tuple[Any, ...]) -> Any:
    """Return the result of the last of some calls. Raises ``DeviceFailed`` if one failed."""
    for code, *_ in results:
        if code != _OK:
            raise DeviceFailed(_text(code))
    found = results[-1][1:]
    return found[0] if len(found) == 1 else found or None


def _is_done(code: Any) -> bool:
    if code != _NOT_READY:
        _checked((code,))
    return bool(code == _OK)


def _text(code: Any) -> str:
    status, text = driver.cuGetErrorString(code)
    said = text.decode() if status == _OK else "unknown"
    lost = "; all that this rank had on the GPU is lost: restart it" if int(code) in _FATAL else ""
    return f"{said} ({getattr(code, 'name', code)}){lost}"


class CudaDevice:
    """GPU of this process, with the context that frameworks use. See :class:`~hvdlab.collectives.planes.gpu.device.Device`.

    Args:
        ordinal: Its number in this process.

    Raises:
        DeviceFailed: There is no such GPU, or it has no memory left for a context.
    """

    def __init__(self, ordinal: int) -> None:
        self._device = _checked(driver.cuInit(0), driver.cuDeviceGet(ordinal))
        self._context = _checked(driver.cuDevicePrimaryCtxRetain(self._device))
        self.identity = _identity(self._device)
        self.owner = _OWNER
        self.opened = OpenedPieces(self)
        attributes = driver.CUdevice_attribute
        self._blocks = _BLOCKS * self._attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._capability = 10 * self._attribute(
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        ) + self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        #: The kernels compiled so far: the module, which must stay loaded, and its kernel.
        self._kernels: dict[tuple[DType | None, ReduceOp], tuple[Any, Any]] = {}
        self._guard = threading.Lock()

    def _attribute(self, which: Any) -> int:
        return int(_checked(driver.cuDeviceGetAttribute(which, self._device)))

    def __enter__(self) -> None:
        # Pushed, not set: the thread can be a user's, whose framework has to find its own context again.
        _checked(driver.cuCtxPushCurrent(self._context))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _checked(driver.cuCtxPopCurrent())

    def reaches(self, identity: str) -> bool:
        if identity == self.identity:
            return True
        for ordinal in range(_checked(driver.cuDeviceGetCount())):
            other = _checked(driver.cuDeviceGet(ordinal))
            if _identity(other) == identity:
                return bool(_checked(driver.cuDeviceCanAccessPeer(self._device, other)))
        return False

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        return int(_checked(driver.cuMemAlloc(nbytes)))

    def free(self, pointer: int) -> None:
        _checked(driver.cuMemFree(pointer))

    def allocation_of(self, pointer: int) -> Allocation | None:
        status, base, nbytes = driver.cuMemGetAddressRange(pointer)
        if status != _OK:
            return None
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        status, serial = driver.cuPointerGetAttribute(attribute, base)
        return Allocation(int(base), int(nbytes), int(serial)) if status == _OK else None

    def export(self, base: int) -> bytes | None:
        status, handle = driver.cuIpcGetMemHandle(base)
        return bytes(handle.reserved) if status == _OK else None

    def open(self, handle: bytes) -> int:
        given = driver.CUipcMemHandle()
        given.reserved = handle
        # The driver accepts no other flags here.
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(_checked(driver.cuIpcOpenMemHandle(given, int(lazily))))

    def close(self, pointer: int) -> None:
        _checked(driver.cuIpcCloseMemHandle(pointer))

    def register(self, address: int, nbytes: int) -> int:
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        _checked(driver.cuMemHostRegister(address, nbytes, flags))
        return int(_checked(driver.cuMemHostGetDevicePointer(address, 0)))

    def unregister(self, address: int) -> None:
        _checked(driver.cuMemHostUnregister(address))

    # -- order --------------------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        _, highest = _checked(driver.cuCtxGetStreamPriorityRange())
        # Otherwise work on the legacy default stream, which frameworks use, would wait for this one, and this
        # one for it.
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(_checked(driver.cuStreamCreateWithPriority(int(flags), highest)))

    def end_stream(self, stream: int) -> None:
        _checked(driver.cuStreamDestroy(stream))

    def new_event(self) -> int:
        kinds = driver.CUevent_flags
        flags = int(kinds.CU_EVENT_DISABLE_TIMING) | int(kinds.CU_EVENT_BLOCKING_SYNC)
        return int(_checked(driver.cuEventCreate(flags)))

    def end_event(self, event: int) -> None:
        _checked(driver.cuEventDestroy(event))

    def record(self, event: int, stream: int) -> None:
        _checked(driver.cuEventRecord(event, stream))

    def wait_event(self, stream: int, event: int) -> None:
        _checked(driver.cuStreamWaitEvent(stream, event, 0))

    def has_come(self, event: int) -> bool:
        return _is_done(*driver.cuEventQuery(event))

    def is_idle(self, stream: int) -> bool:
        return _is_done(*driver.cuStreamQuery(stream))

    def synchronize(self, event: int) -> None:
        soon = monotonic_ns() + _SOON
        while monotonic_ns() < soon:
            if self.has_come(event):
                return
            os.sched_yield()
        _checked(driver.cuEventSynchronize(event))

    def drained(self, stream: int) -> bool:
        # Any error counts as drained, too: the work of a GPU that has failed is gone.
        return bool(driver.cuStreamQuery(stream)[0] != _NOT_READY)

    def write_value(self, stream: int, address: int, value: int) -> None:
        # Cut to 32 bits: the counters overflow, and waits compare them by their difference.
        _checked(driver.cuStreamWriteValue32(stream, address, value & 0xFFFFFFFF, 0))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        _checked(driver.cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, 0))

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        _checked(driver.cuMemcpyAsync(target, source, nbytes, stream))

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        _checked(driver.cuMemsetD8Async(target, 0, nbytes, stream))

    def launch(self, launch: KernelLaunch, stream: int) -> None:
        op, prescale, postscale = launch.reduction
        values = (
            launch.table, launch.jobs, launch.ins, launch.outs, prescale, postscale,
            launch.chunk, launch.stopped, launch.members, launch.stride, launch.times,
        )  # fmt: skip
        blocks = min(launch.chunks, self._blocks)
        _checked(
            driver.cuLaunchKernel(
                self._kernel(launch.dtype, op),
                blocks,
                1,
                1,
                _THREADS,
                1,
                1,
                0,
                stream,
                (values, _TYPES),
                0,
            )
        )

    def _kernel(self, dtype: DType | None, op: ReduceOp) -> Any:
        # A copy has no operator: one kernel copies for all of them.
        key = (dtype, ReduceOp.SUM if dtype is None else op)
        with self._guard:
            # Under the guard, so that threads that need the same kernel compile it once.
            if key not in self._kernels:
                module = _checked(driver.cuModuleLoadData(compiled_kernel(dtype, op, self._capability)))
                name = kernel_name(dtype).encode()
                self._kernels[key] = module, _checked(driver.cuModuleGetFunction(module, name))
            return self._kernels[key][1]


def _identity(device: Any) -> str:
    # The second version distinguishes instances of a partitioned GPU; from CUDA 13 on it has the first one's name.
    uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    return bytes(_checked(uuid(device)).bytes).hex()


def kernel_name(dtype: DType | None) -> str:
    """Return the name of the kernel that reduces a type, or copies bytes."""
    return "copy" if dtype is None else "fold"


def kernel_macros(dtype: DType | None, op: ReduceOp) -> dict[str, str]:
    """Return the macros that choose the kernel in the source, by name."""
    if dtype is None:
        return {}
    return {"ELEMENT": ELEMENTS[dtype], "OP": op.name}


def compiler_version() -> int:
    """Return the CUDA version of the compiler: the driver must be of that or a later one. Raises ``RuntimeError`` if there is no compiler."""
    return int(_nvrtc_checked(nvrtc.nvrtcVersion())[0])


def kernel_source() -> bytes:
    """Return the text of ``kernels.cu``."""
    return files(__package__).joinpath(_SOURCE).read_bytes()


def compiled_kernel(dtype: DType | None, op: ReduceOp, capability: int) -> bytes:
    """Compile a kernel. Return it as the driver loads it.

    Args:
        dtype: Type of the reduced elements; ``None`` copies bytes.
        op: SUM, MIN, MAX or PRODUCT.
        capability: Compute capability of the GPU, as 90 for 9.0. A GPU newer than the compiler gets code that the driver translates.

    Raises:
        DeviceFailed: The compiler is missing, knows no GPU that old, or refuses the source; the text has its message.
    """
    try:
        known = _nvrtc_checked(nvrtc.nvrtcGetSupportedArchs())
        program = _nvrtc_checked(nvrtc.nvrtcCreateProgram(kernel_source(), _SOURCE.encode(), 0, [], []))
    except RuntimeError as error:  # the bindings don't find the library
        raise DeviceFailed(
            f"NVIDIA's runtime compiler is missing (pip install 'hvdlab[gpu]'): {error}"
        ) from error
    try:
        options = [f"--gpu-architecture={architecture(capability, known)}", "--std=c++17"]
        options += [f"--define-macro={name}={value}" for name, value in kernel_macros(dtype, op).items()]
        given = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if status != _NVRTC_OK:
            raise DeviceFailed(f"NVIDIA's compiler refused the kernels: {_compiler_log(program)}")
        code: bytes
        # Code for a GPU that the compiler knows; for a newer one PTX, which the driver translates (see architecture()).
        if capability in known:
            # The bindings fill a bytes object of the right length in place.
            code = b" " * _nvrtc_checked(nvrtc.nvrtcGetCUBINSize(program))
            _nvrtc_checked(nvrtc.nvrtcGetCUBIN(program, code))
        else:
            code = b" " * _nvrtc_checked(nvrtc.nvrtcGetPTXSize(program))
            _nvrtc_checked(nvrtc.nvrtcGetPTX(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def architecture(capability: int, known: list[int]) -> str:
    """Return the architecture to compile for: the GPU itself, or the newest one that the compiler knows and that is older.

    Raises:
        DeviceFailed: The compiler knows no GPU that old.
    """
    if capability in known:
        return f"sm_{capability}"
    older = [one for one in known if one < capability]
    if not older:
        raise DeviceFailed(f"NVIDIA's compiler makes no code for GPUs as old as this one (sm_{capability})")
    return f"compute_{max(older)}"


def _nvrtc_checked(result: tuple[Any, ...]) -> Any:
    status, *found = result
    if status != _NVRTC_OK:
        raise DeviceFailed(f"NVIDIA's compiler: {status.name}")
    return found[0] if len(found) == 1 else found


def _compiler_log(program: Any) -> str:
    text: bytes = b" " * _nvrtc_checked(nvrtc.nvrtcGetProgramLogSize(program))
    _nvrtc_checked(nvrtc.nvrtcGetProgramLog(program, text))
    return text.decode(errors="replace").strip("\0 \n")

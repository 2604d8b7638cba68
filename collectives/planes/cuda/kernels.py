"""Compiles ``kernels.cu`` for a GPU, a reduction at a time, when it is first needed.

NVIDIA's compiler for running programs (NVRTC) comes with torch's builds for CUDA and with ``hvdlab[gpu]``; it needs no toolkit and no GPU.
So what ships is the source, and the code is made for the GPU that is there. Compiling takes a fraction of a second, only in the processes
of workers (:mod:`~hvdlab.collectives.planes.cuda.group`), once for each type of elements and operator.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from cuda.bindings import nvrtc

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.cuda.device import DeviceFailed

_SOURCE = "kernels.cu"
_OK = nvrtc.nvrtcResult.NVRTC_SUCCESS

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
"""The structs of ``kernels.cu``, by what they reduce."""


def entry(dtype: DType | None) -> str:
    """Name of the kernel that reduces a type, or copies bytes."""
    return "copy" if dtype is None else "fold"


def macros(dtype: DType | None, op: ReduceOp) -> dict[str, str]:
    """The macros that choose the kernel in the source, by name."""
    if dtype is None:
        return {}
    return {"ELEMENT": ELEMENTS[dtype], "OP": op.name}


def compiler_version() -> int:
    """Of which CUDA the compiler is: the driver must be of that or a later one. Raises ``RuntimeError`` if it is not there."""
    return int(_checked(nvrtc.nvrtcVersion())[0])


def source() -> bytes:
    """The text of ``kernels.cu``."""
    return files(__package__).joinpath(_SOURCE).read_bytes()


def compiled(dtype: DType | None, op: ReduceOp, capability: int) -> bytes:
    """A kernel as the driver loads it.

    Args:
        dtype: What is reduced; ``None`` copies bytes.
        op: SUM, MIN, MAX or PRODUCT.
        capability: Compute capability of the GPU, as 90 for 9.0. A GPU newer than the compiler gets code that the driver translates.

    Raises:
        DeviceFailed: The compiler is missing, knows no GPU that old, or refuses the source; the text says what it said.
    """
    try:
        known = _checked(nvrtc.nvrtcGetSupportedArchs())
        program = _checked(nvrtc.nvrtcCreateProgram(source(), _SOURCE.encode(), 0, [], []))
    except RuntimeError as error:  # the bindings don't find the library
        raise DeviceFailed(
            f"NVIDIA's runtime compiler is missing (pip install 'hvdlab[gpu]'): {error}"
        ) from error
    try:
        options = [f"--gpu-architecture={architecture(capability, known)}", "--std=c++17"]
        options += [f"--define-macro={name}={value}" for name, value in macros(dtype, op).items()]
        given = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if status != _OK:
            raise DeviceFailed(f"NVIDIA's compiler refused the kernels: {_log(program)}")
        code: bytes
        if capability in known:
            code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
            _checked(nvrtc.nvrtcGetCUBIN(program, code))
        else:
            code = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
            _checked(nvrtc.nvrtcGetPTX(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def architecture(capability: int, known: list[int]) -> str:
    """For what to compile: the GPU itself, or the newest one that the compiler knows and that is older.

    Raises:
        DeviceFailed: The compiler knows no GPU that old.
    """
    if capability in known:
        return f"sm_{capability}"
    older = [one for one in known if one < capability]
    if not older:
        raise DeviceFailed(f"NVIDIA's compiler makes no code for GPUs as old as this one (sm_{capability})")
    return f"compute_{max(older)}"


def _checked(result: tuple[Any, ...]) -> Any:
    status, *found = result
    if status != _OK:
        raise DeviceFailed(f"NVIDIA's compiler: {status.name}")
    return found[0] if len(found) == 1 else found


def _log(program: Any) -> str:
    text: bytes = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
    _checked(nvrtc.nvrtcGetProgramLog(program, text))
    return text.decode(errors="replace").strip("\0 \n")

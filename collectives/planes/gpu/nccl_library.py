"""NCCL's library, as far as the plane needs it. :func:`nccl` is the one of this process; tests have a simulated one.

It is called by ctypes, and not through a framework: so it serves all of them, and a communicator is ours to abort. Communicators
are of the kind that does not block: a call returns at once, and :meth:`Communicator.settled` returns whether its work is enqueued.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdlab.collectives.planes.gpu.device import DeviceFailed
from hvdlab.collectives.types import DType, ReduceOp

ID_BYTES = 128
"""Bytes of the id that :meth:`Nccl.unique_id` returns."""
LEAST_VERSION = 21400
"""NCCL 2.14: from then on calls need not block."""

TYPES = {
    DType.I8: 0,
    DType.U8: 1,
    DType.I32: 2,
    DType.I64: 4,
    DType.F32: 7,
    DType.F64: 8,
}
"""NCCL's numbers of the types that it reduces for us. f16 and bf16 are not among them: it rounds them each time that it adds."""
OPERATORS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
"""NCCL's numbers of the operators."""

_SONAME = "libnccl.so.2"
_BYTES = 0  # the type that data is moved as
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_MAGIC = 0xCAFEBEEF  # by which NCCL recognises an ncclConfig_t
_PAUSE = 0.001  # seconds between two polls of NCCL's work in the background, for which it has no event


class NcclFailed(DeviceFailed):
    """Error of NCCL, which refused a call or lost a connection; the text has NCCL's own message."""


class NcclPiece(NamedTuple):
    """Memory of the GPU that goes to a member, or that comes from it.

    Attributes:
        member: Its position.
        pointer: Address of the first byte.
        nbytes: Size in bytes.
    """

    member: int
    pointer: int
    nbytes: int


class Communicator(Protocol):
    """Member's part of a group of GPUs. One thread at a time, with the member's GPU as its current device.

    No method but :meth:`settled`, :meth:`abort` and :meth:`close` may be called before :meth:`settled` is true. Those that move data
    enqueue their work on a stream, are called by all members in one order, and raise ``NcclFailed``.
    """

    def settled(self) -> bool:
        """Return whether only the GPU's part of the last call is left: its work is enqueued, or the communicator is made.

        Raises:
            NcclFailed: That call failed, or a connection was lost since.
        """
        ...

    def allreduce(
        self, source: int, target: int, count: int, dtype: DType, op: ReduceOp, stream: int
    ) -> None:
        """Reduce ``count`` elements, whose type is one of :data:`TYPES`; source and target may be the same."""
        ...

    def allgather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Bring ``nbytes`` bytes of each member to all, in the order of positions."""
        ...

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        """Copy the root's ``source`` to the ``target`` of all."""
        ...

    def exchange(self, sends: Sequence[NcclPiece], receives: Sequence[NcclPiece], stream: int) -> None:
        """Send and receive all pieces at once. At most one goes from one member to another; a member that has none need not call."""
        ...

    def abort(self) -> None:
        """End operations that are on their way, here only, and free everything. It may last half a second, or as long as the stream waits for others' work."""
        ...

    def close(self, within: float) -> None:
        """Free everything once all that others wait for has been sent, or after ``within`` seconds."""
        ...


class Nccl(Protocol):
    """Library NCCL. Any thread."""

    @property
    def version_text(self) -> str:
        """Return the version, as ``2.28.9``."""
        ...

    def unique_id(self) -> bytes:
        """Begin a group. Return its id, which the other members need."""
        ...

    def connect(self, identity: bytes, members: int, index: int) -> Communicator:
        """Begin to join a group, by the current device; it is done when :meth:`Communicator.settled` is true."""
        ...


def why_missing() -> str | None:
    """Return why this process has no NCCL, in one sentence with the remedy; ``None`` if it has. Loads the library."""
    try:
        nccl()
    except NcclFailed as error:
        return str(error)
    return None


@cache
def nccl() -> Nccl:
    """Return this process's NCCL.

    Raises:
        NcclFailed: There is none, or it is too old.
    """
    return LoadedNccl(_load())


def _load() -> ctypes.CDLL:
    reasons = []
    # The package's first: it is the one that torch is built for, which could not work with an older one of the system's.
    for path in (*_packaged(), _SONAME):
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    raise NcclFailed(
        "NCCL is missing: torch's builds for CUDA bring it, as does pip install nvidia-nccl-cu13 "
        f"({'; '.join(reasons)})."
    )


def _packaged() -> list[str]:
    """Return paths of the library in NVIDIA's package, whichever CUDA that is for."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = (found.submodule_search_locations or ()) if found is not None else ()
    paths = (Path(place) / "lib" / _SONAME for place in places)
    return [str(path) for path in paths if path.exists()]


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """Beginning of ``ncclConfig_t`` as it was in 2.14. By ``size`` and ``version`` later versions know that the rest is left to them."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_ADDRESS),
        _INT,
        _UniqueId,
        _INT,
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (_ADDRESS, ctypes.POINTER(_INT)),
    "ncclCommFinalize": (_ADDRESS,),
    "ncclCommDestroy": (_ADDRESS,),
    "ncclCommAbort": (_ADDRESS,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # source, target, elements, type, operator, communicator, stream
    "ncclAllReduce": (_ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _ADDRESS, _ADDRESS),
    # source, target, elements of one member, type, communicator, stream
    "ncclAllGather": (_ADDRESS, _ADDRESS, _SIZE, _INT, _ADDRESS, _ADDRESS),
    # source, target, elements, type, root, communicator, stream
    "ncclBroadcast": (_ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _ADDRESS, _ADDRESS),
    # memory, elements, type, other member, communicator, stream
    "ncclSend": (_ADDRESS, _SIZE, _INT, _INT, _ADDRESS, _ADDRESS),
    "ncclRecv": (_ADDRESS, _SIZE, _INT, _INT, _ADDRESS, _ADDRESS),
}


class LoadedNccl:
    """NCCL as it is loaded in this process. See :class:`Nccl`.

    Raises:
        NcclFailed: It is too old.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        version = _INT()
        # Before the signatures are set: an older library lacks some of these functions, and is to be refused by its version.
        library.ncclGetVersion(ctypes.byref(version))
        self.version: int = version.value
        if self.version < LEAST_VERSION:
            raise NcclFailed(
                f"NCCL is too old: calls of version {self.version} block ({LEAST_VERSION} is needed)."
            )
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _INT
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (_INT,), ctypes.c_char_p
        library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = (_ADDRESS,), ctypes.c_char_p

    @property
    def version_text(self) -> str:
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def unique_id(self) -> bytes:
        found = _UniqueId()
        self.check(self.library.ncclGetUniqueId(ctypes.byref(found)))
        return bytes(found)

    def connect(self, identity: bytes, members: int, index: int) -> LoadedCommunicator:
        handle = _ADDRESS()
        # The last field makes the communicator one that does not block. The version is that of the struct above, not the library's.
        config = _Config(ctypes.sizeof(_Config), _MAGIC, LEAST_VERSION, 0)
        self.check(
            self.library.ncclCommInitRankConfig(
                ctypes.byref(handle),
                members,
                _UniqueId.from_buffer_copy(identity),
                index,
                ctypes.byref(config),
            )
        )
        return LoadedCommunicator(self, handle)

    def check(self, status: int, handle: ctypes.c_void_p | None = None) -> None:
        """Raise ``NcclFailed`` unless a call succeeded or goes on in the background."""
        if status in (_SUCCESS, _IN_PROGRESS):
            return
        text = self.library.ncclGetErrorString(status).decode(errors="replace")
        more = (self.library.ncclGetLastError(handle) or b"").decode(errors="replace").strip()
        raise NcclFailed(f"NCCL: {text}" + (f" ({more})" if more else ""))


class LoadedCommunicator:
    """See :class:`Communicator`."""

    def __init__(self, nccl: LoadedNccl, handle: ctypes.c_void_p) -> None:
        self._nccl, self._handle = nccl, handle

    def _state(self) -> int:
        state = _INT()
        self._nccl.check(self._nccl.library.ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        return state.value

    def settled(self) -> bool:
        state = self._state()
        self._nccl.check(state, self._handle)
        return state != _IN_PROGRESS

    def _check(self, status: int) -> None:
        self._nccl.check(status, self._handle)

    def allreduce(
        self, source: int, target: int, count: int, dtype: DType, op: ReduceOp, stream: int
    ) -> None:
        call = self._nccl.library.ncclAllReduce
        self._check(call(source, target, count, TYPES[dtype], OPERATORS[op], self._handle, stream))

    def allgather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        self._check(self._nccl.library.ncclAllGather(source, target, nbytes, _BYTES, self._handle, stream))

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        call = self._nccl.library.ncclBroadcast
        self._check(call(source, target, nbytes, _BYTES, root, self._handle, stream))

    def exchange(self, sends: Sequence[NcclPiece], receives: Sequence[NcclPiece], stream: int) -> None:
        library = self._nccl.library
        self._check(library.ncclGroupStart())
        try:
            self._add(library.ncclSend, sends, stream)
            self._add(library.ncclRecv, receives, stream)
        finally:
            # Also after a failure: a group that is begun collects all later calls of this thread.
            status = library.ncclGroupEnd()
        self._check(status)

    def _add(self, call: Callable[..., int], pieces: Sequence[NcclPiece], stream: int) -> None:
        for piece in pieces:
            self._check(call(piece.pointer, piece.nbytes, _BYTES, piece.member, self._handle, stream))

    def abort(self) -> None:
        self._nccl.check(self._nccl.library.ncclCommAbort(self._handle))

    def close(self, within: float) -> None:
        end = time.monotonic() + within
        try:
            self._check(self._nccl.library.ncclCommFinalize(self._handle))
            while not self.settled():
                if time.monotonic() > end:
                    raise NcclFailed("NCCL: the communicator is not done with what others wait for")
                time.sleep(_PAUSE)
        except NcclFailed:
            self.abort()
            raise
        self._nccl.check(self._nccl.library.ncclCommDestroy(self._handle))

"""How NCCL is called: the calls and their order, with a library that only takes notes. ``tests/gpu`` has the real one."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.planes.gpu import nccl_library
from hvdlab.collectives.planes.gpu.nccl_library import (
    ID_BYTES,
    LEAST_VERSION,
    LoadedCommunicator,
    LoadedNccl,
    NcclFailed,
    NcclPiece,
)
from hvdlab.collectives.types import DType, ReduceOp

IN_PROGRESS, REMOTE_ERROR = 7, 6


class Recorder:
    """Library whose functions return a test's values, and are recorded with their numbers."""

    def __init__(self, version: int = LEAST_VERSION) -> None:
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        #: A function's result, by name, if it is not 0.
        self.returns: dict[str, int] = {}
        #: The communicator's states, one for each query.
        self.states: Iterator[int] = itertools.repeat(0)
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nccl"):
            raise AttributeError(name)

        def function(*arguments: Any) -> Any:
            return self._call(name, arguments)

        return self._functions.setdefault(name, function)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "ncclGetVersion":
            arguments[0]._obj.value = self.version
        elif name == "ncclCommGetAsyncError":
            arguments[1]._obj.value = next(self.states)
        elif name == "ncclGetErrorString":
            return f"error {arguments[0]}".encode()
        elif name == "ncclGetLastError":
            return b"the last one"
        else:
            self.calls.append((name, *(a for a in arguments if isinstance(a, int))))
        return self.returns.get(name, 0)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def communicator(recorder: Recorder) -> LoadedCommunicator:
    made = LoadedNccl(recorder).connect(b"x" * ID_BYTES, 3, 1)  # type: ignore[arg-type]
    recorder.calls.clear()
    return made


def test_a_communicator_is_made_without_blocking(recorder: Recorder) -> None:
    given: list[Any] = []
    nccl = LoadedNccl(recorder)  # type: ignore[arg-type]

    def connect(*arguments: Any) -> int:
        given.extend(arguments)
        return IN_PROGRESS

    recorder._functions["ncclCommInitRankConfig"] = connect
    identity = bytes(range(ID_BYTES))
    nccl.connect(identity, 3, 1)
    _, members, sent, index, config = given
    assert (members, index, bytes(sent)) == (3, 1, identity)
    assert bytes(config._obj)[:20] == bytes(ctypes.c_uint64(24)) + bytes(ctypes.c_uint32(0xCAFEBEEF)) + bytes(
        ctypes.c_uint32(21400)
    ) + bytes(4)


def test_a_call_has_settled_when_it_is_no_longer_in_progress(
    recorder: Recorder, communicator: LoadedCommunicator
) -> None:
    recorder.states = iter([IN_PROGRESS, 0, REMOTE_ERROR])
    assert not communicator.settled()
    assert communicator.settled()
    with pytest.raises(NcclFailed, match=r"error 6 \(the last one\)"):
        communicator.settled()


def test_numbers_of_types_and_operators(recorder: Recorder, communicator: LoadedCommunicator) -> None:
    recorder.returns["ncclAllReduce"] = IN_PROGRESS
    communicator.allreduce(100, 200, 5, DType.F64, ReduceOp.MAX, 9)
    communicator.allgather(100, 200, 5, 9)
    communicator.broadcast(100, 200, 5, 2, 9)
    assert recorder.calls == [
        ("ncclAllReduce", 100, 200, 5, 8, 2, 9),
        ("ncclAllGather", 100, 200, 5, 0, 9),
        ("ncclBroadcast", 100, 200, 5, 0, 2, 9),
    ]


def test_pieces_are_exchanged_at_once(recorder: Recorder, communicator: LoadedCommunicator) -> None:
    communicator.exchange([NcclPiece(0, 100, 5), NcclPiece(2, 105, 6)], [NcclPiece(2, 300, 7)], 9)
    assert recorder.calls == [
        ("ncclGroupStart",),
        ("ncclSend", 100, 5, 0, 0, 9),
        ("ncclSend", 105, 6, 0, 2, 9),
        ("ncclRecv", 300, 7, 0, 2, 9),
        ("ncclGroupEnd",),
    ]


def test_a_group_of_calls_ends_also_if_one_of_them_fails(
    recorder: Recorder, communicator: LoadedCommunicator
) -> None:
    recorder.returns["ncclSend"] = 4
    with pytest.raises(NcclFailed, match="error 4"):
        communicator.exchange([NcclPiece(0, 100, 5)], [NcclPiece(2, 300, 7)], 9)
    assert recorder.calls[-1] == ("ncclGroupEnd",)


def test_closing_waits_until_what_others_need_is_sent(
    recorder: Recorder, communicator: LoadedCommunicator
) -> None:
    recorder.states = iter([IN_PROGRESS, IN_PROGRESS, 0])
    communicator.close(10.0)
    assert recorder.calls == [("ncclCommFinalize",), ("ncclCommDestroy",)]


@pytest.mark.parametrize("state", [IN_PROGRESS, REMOTE_ERROR])
def test_closing_gives_up_on_what_can_not_be_sent(
    recorder: Recorder, communicator: LoadedCommunicator, state: int
) -> None:
    recorder.states = itertools.repeat(state)
    with pytest.raises(NcclFailed):
        communicator.close(0.0)
    assert recorder.calls == [("ncclCommFinalize",), ("ncclCommAbort",)]


def test_an_old_library_is_refused() -> None:
    with pytest.raises(NcclFailed, match="21304"):
        LoadedNccl(Recorder(21304))  # type: ignore[arg-type]


def test_the_package_is_found_and_goes_before_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    (tmp_path / "nvidia" / "nccl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    tried: list[str] = []

    def load(path: str) -> None:
        tried.append(path)
        raise OSError(f"no {path}")

    monkeypatch.setattr(ctypes, "CDLL", load)
    nccl_library.nccl.cache_clear()
    try:
        reason = nccl_library.why_missing() or ""
    finally:
        nccl_library.nccl.cache_clear()
    assert tried[-1] == "libnccl.so.2"
    assert str(packaged) in tried[:-1]
    assert "pip install nvidia-nccl-cu13" in reason
    assert "no libnccl.so.2" in reason

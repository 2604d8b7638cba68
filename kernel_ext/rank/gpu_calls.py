"""Which kernels this process has launched on GPUs, and which of its threads wait for a GPU: what ``%hvd_where`` shows with
``HVDLAB_CUDA_KERNELS=1``.

NVIDIA's library CUPTI calls back at the entry and exit of calls of the driver. Only those that launch and those that wait are asked for;
each launch then takes some 3 microseconds longer, on the host, which is why it has to be asked for. Nothing is asked of the driver when a
user looks: the driver could be stuck, and a stream that is asked about could be gone.

A kernel counts as done once a thread has waited for its stream, or for the whole GPU, after the launch. What a rank is said to wait for is
therefore what it had launched since, which is at least what is still to be done.

CUPTI has room for one subscriber: without this, for PyTorch's profiler.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvdlab.kernel_ext.payloads import GpuWait

SWITCH = "HVDLAB_CUDA_KERNELS"
"""The variable that, at 1, has a rank keep this."""
NAMED = 4
"""Kernels that are named, those that were launched last."""
GRAPH = b"a CUDA graph"
_WHOLE_GPU = -1
_LEGACY_STREAM = 1  # another name of stream 0


class _Stream:
    """The kernels of one stream.

    Attributes:
        launched: How many there were.
        done: How many of them are known to be done.
        last: The names of the last ones.
    """

    __slots__ = ("done", "last", "launched")

    def __init__(self) -> None:
        self.launched = self.done = 0
        self.last: deque[bytes] = deque(maxlen=NAMED)


class _Wait(NamedTuple):
    """A call in which a thread waits.

    Attributes:
        call: The driver's function.
        stream: What it waits for: a stream, the whole GPU, or ``None`` for anything else.
        since: When it began, by ``time.monotonic_ns()``.
        launched: How many kernels each stream had at that time.
    """

    call: str
    stream: int | None
    since: int
    launched: dict[int, int]


class GpuCalls:
    """What was launched and what is waited for. Each method is called by the thread in question, but for :meth:`wait_of`.

    Attributes:
        lacks: Why nothing of that is reported; empty if it is.
    """

    def __init__(self) -> None:
        self.lacks = ""
        self._streams: dict[int, _Stream] = {}
        self._waits: dict[int, _Wait] = {}

    def launch(self, stream: int, kernel: bytes) -> None:
        """A kernel (its name as the compiler has it) goes to a stream."""
        there = self._streams.get(stream)
        if there is None:
            there = self._streams[stream] = _Stream()
        there.launched += 1
        there.last.append(kernel)

    def begin_wait(self, thread: int, call: str, stream: int | None) -> None:
        """A thread begins to wait; ``stream`` is -1 for the whole GPU and ``None`` if what it waits for is none of both."""
        launched = {number: there.launched for number, there in list(self._streams.items())}
        self._waits[thread] = _Wait(call, stream, time.monotonic_ns(), launched)

    def end_wait(self, thread: int) -> None:
        """A thread has waited: what it waited for is done."""
        wait = self._waits.pop(thread, None)
        if wait is None or wait.stream is None:
            return
        for number, launched in wait.launched.items():
            if wait.stream in (_WHOLE_GPU, number):
                there = self._streams[number]
                there.done = max(there.done, launched)

    def wait_of(self, thread: int) -> GpuWait | None:
        """What a thread waits for now, or why that is unknown; ``None`` if it does not wait for a GPU. Any thread."""
        if self.lacks:
            return GpuWait(lacks=self.lacks)
        wait = self._waits.get(thread)
        if wait is None:
            return None
        kernels: list[bytes] = []
        count = 0
        for number, there in list(self._streams.items()):
            pending = there.launched - there.done
            if pending > 0 and wait.stream in (_WHOLE_GPU, None, number):
                count += pending
                kernels += list(there.last)[-pending:]
        names = tuple(readable(kernel) for kernel in kernels[-NAMED:])
        return GpuWait(wait.call, (time.monotonic_ns() - wait.since) / 1e9, count, names)


# -- names ------------------------------------------------------------------------------------------------------------


def readable(kernel: bytes) -> str:
    """A kernel's name as its programmer wrote it, without its arguments: ``at::native::vectorized_elementwise_kernel<4, …>``."""
    text = _demangled(kernel) if kernel.startswith(b"_Z") else kernel.decode(errors="replace")
    text = text.removeprefix("void ")
    depth, end = 0, len(text)
    for place, letter in enumerate(
        text
    ):  # the arguments begin with the first parenthesis outside of all angles
        if letter == "(" and not depth and text[place : place + 11] != "(anonymous ":
            end = place
            break
        depth += (letter == "<") - (letter == ">" and text[place - 1 : place] != "-")
    text = re.sub(r"\s+", " ", text[:end])
    head, angle, rest = text.partition("<")
    return text if len(rest) <= 60 else f"{head}{angle}{rest[:60]}…>"


def _demangled(kernel: bytes) -> str:
    plain = kernel.decode(errors="replace")
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        free = ctypes.CDLL(None).free
    except OSError:
        return plain
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    found = library.__cxa_demangle(kernel, None, None, ctypes.byref(status))
    if not found:
        return plain
    try:
        return ctypes.string_at(found).decode(errors="replace")
    finally:
        free(ctypes.c_void_p(found))


# -- CUPTI ------------------------------------------------------------------------------------------------------------

_DRIVER = 1  # the domain of the driver's functions
_ENTER = 0
_STREAM_OF = {"cuLaunchKernel": 40}
"""Where the stream is among the arguments of a function, in bytes; they lie in memory as in its declaration."""
_CONFIGURED = {"cuLaunchKernelEx": 32}
"""Where it is in the structure that the first argument points to."""


class _Call(ctypes.Structure):
    """What CUPTI says of a call (``CUpti_CallbackData``)."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("function", ctypes.c_char_p),
        ("arguments", ctypes.c_void_p),
        ("returned", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
    )


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Call)
)  # user's pointer, domain, function, call


class CallsOfDriver:
    """Has CUPTI report the driver's calls of this process.

    Args:
        library: CUPTI.
        calls: Learns of them.

    Raises:
        OSError: CUPTI does not do it, for example because a profiler is there already.
    """

    def __init__(self, library: ctypes.CDLL, calls: GpuCalls) -> None:
        self._library, self._calls = library, calls
        #: What to do at calls of a function, by its number.
        self._launches: dict[int, Callable[[Any], int]] = {}
        self._waits: dict[int, tuple[str, Callable[[Any], int | None]]] = {}
        for number, name in self._functions():
            self._sort(number, name)
        self._callback = _Callback(self._called)  # the library keeps its address only
        self._subscriber = ctypes.c_void_p()
        self._demand("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        for number in (*self._launches, *self._waits):
            self._demand("cuptiEnableCallback", ctypes.c_uint32(1), self._subscriber, _DRIVER, number)

    def _functions(self) -> Iterator[tuple[int, str]]:
        """The driver's functions that this version of CUPTI knows. Their numbers are those of the version."""
        name = ctypes.c_char_p()
        for number in range(1, 2000):
            if self._library.cuptiGetCallbackName(_DRIVER, number, ctypes.byref(name)) == 0 and name.value:
                yield number, name.value.decode()

    def _sort(self, number: int, name: str) -> None:
        function = name.removesuffix("_ptsz").removesuffix("_v2")
        if function in _STREAM_OF:
            offset = _STREAM_OF[function]
            self._launches[number] = lambda arguments: _pointer(arguments + offset)
        elif function in _CONFIGURED:
            within = _CONFIGURED[function]
            self._launches[number] = lambda arguments: _pointer(_pointer(arguments) + within)
        elif function == "cuGraphLaunch":
            self._launches[number] = lambda arguments: _pointer(arguments + 8)
        elif function == "cuCtxSynchronize":
            self._waits[number] = function, lambda arguments: _WHOLE_GPU
        elif function == "cuStreamSynchronize":
            self._waits[number] = function, _pointer
        elif function in ("cuEventSynchronize", "cuMemcpyDtoH", "cuMemcpy"):
            self._waits[number] = function, lambda arguments: None

    def _called(self, user: int | None, domain: int, number: int, data: Any) -> None:
        call = data[0]
        stream_of = self._launches.get(number)
        if stream_of is not None:
            if call.site == _ENTER:
                self._calls.launch(_stream(stream_of(call.arguments)), call.symbol or GRAPH)
            return
        thread = threading.get_ident()
        if call.site == _ENTER:
            name, waited_for = self._waits[number]
            stream = waited_for(call.arguments)
            self._calls.begin_wait(thread, name, None if stream is None else _stream(stream))
        else:
            self._calls.end_wait(thread)

    def close(self) -> None:
        """No call is reported any more."""
        self._library.cuptiUnsubscribe(self._subscriber)

    def _demand(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} failed with code {code}")


def _pointer(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def _stream(address: int) -> int:
    return 0 if address == _LEGACY_STREAM else address


def keep_gpu_calls() -> GpuCalls:
    """From now on keep what this process launches and waits for on GPUs."""
    calls = GpuCalls()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuInit(
            0
        )  # CUPTI asks the driver; no memory of a GPU is taken by this
        if code:
            raise OSError(f"cuInit failed with code {code}")
        reporting = CallsOfDriver(_library(), calls)
    except OSError as error:
        calls.lacks = str(error)
    else:
        # Before the interpreter ends, as the driver would call back into nothing then. It also keeps the callback until then.
        atexit.register(reporting.close)
    return calls


def _library() -> ctypes.CDLL:
    """CUPTI: the one that a framework has loaded, else the one of NVIDIA's packages, else the system's."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if "/libcupti.so" in path:
                return ctypes.CDLL(f"/{path}")
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cupti").abs_path)
    except Exception as error:  # noqa: BLE001  # not installed, or it finds none: it has errors of its own
        missing = str(error)
    try:
        return ctypes.CDLL("libcupti.so")
    except OSError:
        raise OSError(f"CUPTI is not found ({missing})") from None

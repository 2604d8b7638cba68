"""What a rank has launched on GPUs and waits for, as it is kept, and in words."""

from __future__ import annotations

import ctypes

import pytest

from hvdlab.kernel_ext.output.places import Whereabouts
from hvdlab.kernel_ext.payloads import GpuWait, Stack, StackFrame
from hvdlab.kernel_ext.rank.gpu_calls import GpuCalls, readable

MAIN, OTHER = 1, 2
WHOLE_GPU = -1


@pytest.fixture
def calls() -> GpuCalls:
    return GpuCalls()


def waited_for(calls: GpuCalls, thread: int = MAIN) -> tuple[str, int, tuple[str, ...]]:
    wait = calls.wait_of(thread)
    assert wait is not None
    return wait.call, wait.launched, wait.kernels


def test_a_thread_that_does_not_wait(calls: GpuCalls) -> None:
    calls.launch(0, b"a")
    calls.begin_wait(OTHER, "cuCtxSynchronize", WHOLE_GPU)
    assert calls.wait_of(MAIN) is None


def test_what_was_launched_and_not_waited_for(calls: GpuCalls) -> None:
    for name in (b"a", b"b"):
        calls.launch(0, name)
    calls.begin_wait(MAIN, "cuCtxSynchronize", WHOLE_GPU)
    assert waited_for(calls) == ("cuCtxSynchronize", 2, ("a", "b"))
    calls.end_wait(MAIN)
    assert calls.wait_of(MAIN) is None
    calls.launch(0, b"c")
    calls.begin_wait(MAIN, "cuCtxSynchronize", WHOLE_GPU)
    assert waited_for(calls) == ("cuCtxSynchronize", 1, ("c",))


def test_only_the_last_are_named(calls: GpuCalls) -> None:
    for number in range(100):
        calls.launch(0, b"k%d" % number)
    calls.begin_wait(MAIN, "cuCtxSynchronize", WHOLE_GPU)
    assert waited_for(calls) == ("cuCtxSynchronize", 100, ("k96", "k97", "k98", "k99"))


def test_a_wait_for_a_stream_is_for_its_kernels_alone(calls: GpuCalls) -> None:
    calls.launch(7, b"a")
    calls.launch(8, b"b")
    calls.begin_wait(MAIN, "cuStreamSynchronize", 7)
    assert waited_for(calls) == ("cuStreamSynchronize", 1, ("a",))
    calls.end_wait(MAIN)
    calls.begin_wait(MAIN, "cuCtxSynchronize", WHOLE_GPU)
    assert waited_for(calls) == ("cuCtxSynchronize", 1, ("b",))


def test_a_wait_for_an_event_says_nothing_of_what_is_done(calls: GpuCalls) -> None:
    calls.launch(7, b"a")
    calls.begin_wait(MAIN, "cuEventSynchronize", None)
    calls.end_wait(MAIN)
    calls.begin_wait(MAIN, "cuStreamSynchronize", 7)
    assert waited_for(calls)[1] == 1


def test_what_is_launched_during_a_wait_is_not_done_after_it(calls: GpuCalls) -> None:
    calls.launch(0, b"a")
    calls.begin_wait(MAIN, "cuCtxSynchronize", WHOLE_GPU)
    calls.launch(0, b"of another thread")
    calls.end_wait(MAIN)
    calls.begin_wait(MAIN, "cuCtxSynchronize", WHOLE_GPU)
    assert waited_for(calls) == ("cuCtxSynchronize", 1, ("of another thread",))


def test_why_nothing_is_known(calls: GpuCalls) -> None:
    calls.lacks = "no CUPTI"
    assert calls.wait_of(MAIN) == GpuWait(lacks="no CUPTI")


def has_demangler() -> bool:
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_demangler(), reason="there is no libstdc++")
@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        (
            b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_21CUDAFunctorOnSelf_addIfEESt5arrayIPcLm2EEEEviT0_T1_",
            "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>, std::array<char…>",
        ),
        (b"_Z6kernelIN12_GLOBAL__N_13fooEEvv", "kernel<(anonymous namespace)::foo>"),
        (b"_Z3sumPfi", "sum"),
        (b"_Znonsense", "_Znonsense"),
        (b"hvdlab_reduce", "hvdlab_reduce"),
        (b"a CUDA graph", "a CUDA graph"),
    ],
)
def test_names_are_those_of_the_source(symbol: bytes, name: str) -> None:
    assert readable(symbol) == name


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (GpuWait(lacks="no CUPTI"), "whether it waits for its GPU is unknown: no CUPTI"),
        (GpuWait("cuCtxSynchronize", 3.2, 0, ()), "waits for its GPU for 3 s (cuCtxSynchronize)"),
        (
            GpuWait("cuCtxSynchronize", 3.2, 1, ("a",)),
            "waits for its GPU for 3 s (cuCtxSynchronize): kernel `a`",
        ),
        (
            GpuWait("cuCtxSynchronize", 3.2, 2, ("a", "b")),
            "waits for its GPU for 3 s (cuCtxSynchronize): kernels `a`, `b`",
        ),
        (
            GpuWait("cuCtxSynchronize", 3.2, 9, ("a", "b")),
            "waits for its GPU for 3 s (cuCtxSynchronize): 9 kernels, the last of them `a`, `b`",
        ),
    ],
)
def test_it_is_shown_below_the_stack(wait: GpuWait, text: str) -> None:
    stack = Stack(1, "[7]", (StackFrame("<module>", "cell [7]", 2, "loss.item()"),), gpu=wait)
    assert repr(Whereabouts({0: stack})).splitlines()[-1].strip() == text

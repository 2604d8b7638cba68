"""The check of the plane for CUDA tensors, by ranks on simulated GPUs with a simulated NCCL: its choice, its failures,
and the operations after it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.planes.base import THROUGH_HOST, PlaneContext
from hvdlab.collectives.planes.gpu import checked_plane, gpu_plane
from hvdlab.collectives.planes.gpu.nccl_library import NcclFailed
from hvdlab.collectives.protocol.messages import Member
from hvdlab.collectives.system import HOST_VARIABLE
from hvdlab.collectives.tracing.record_format import Members, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import Membership
from hvdlab.widgets.recording_feed import rank_rows
from support.fakes import nccl as fake_nccl
from support.fakes.cuda import FakeCuda, bytes_at
from support.patience import PATIENCE
from support.ranks.gpu_members import Store, simulated_gpu
from support.ranks.resident import RankGone, Ranks

COUNT = 50_000
NCCL = "NCCL 2.28.9, checked"
IPC = "cuda/ipc, checked"
BOUND = 1.0
"""Seconds that the check gets where it is not to end."""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(3, init=False, env={fake_nccl.DIRECTORY: str(tmp_path)}) as ranks:
        yield ranks


# -- on the ranks -----------------------------------------------------------------------------------------------------


def arrays() -> Any:
    from support.fakes import gpu_arrays as fake_gpu_arrays

    return fake_gpu_arrays


class Lines(logging.Handler):
    """Lines that hvdlab has logged in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_LINES = Lines()


def join(gpus: str, hosts: str = "aaa", choice: str = "auto", seen: int = 1) -> str:
    """Join as a rank on the GPU and the host that the letters name; return the plane that the coordinator gives."""
    rank = int(os.environ["HVDLAB_RANK"])
    os.environ[HOST_VARIABLE] = hosts[rank]
    os.environ[gpu_plane.CHOICE] = choice
    os.environ.pop(gpu_plane.SWITCH, None)
    gpu = arrays().GPU
    gpu.identity = gpus[rank] * 32
    gpu_plane.gpus().gpus = seen  # type: ignore[attr-defined]
    fake_nccl.install(gpu)
    logging.getLogger("hvdlab").addHandler(_LINES)
    context.init()
    return context.engine().device_plane(0, "cuda")


def total(count: int = COUNT) -> float:
    hvd = arrays()
    return float(hvd.allreduce(hvd.on_gpu(np.ones(count)), op=hvd.Sum).get()[-1])


def shown() -> tuple[tuple[str, ...], list[str], list[str]]:
    """Return the names of planes and links that the status shows, and the lines that were logged."""
    engine = context.engine()
    return engine.device_planes(), list(engine.links()), _LINES.lines


_RECORDED: list[Members] = []


def keep_records() -> None:
    """Keep what this rank records about process sets from now on, before it is sent."""
    recorder = context.engine().recorder
    record = recorder.members

    def members(process_set: int, generation: int, size: int, plane: str = "") -> None:
        _RECORDED.append(Members(process_set, generation, size, time.monotonic_ns(), plane))
        record(process_set, generation, size, plane)

    recorder.members = members  # type: ignore[method-assign]


def records() -> list[Members]:
    return _RECORDED


def everything() -> list[Any]:
    """Run one collective of each kind that works on a GPU's memory."""
    hvd, rank = arrays(), context.engine().rank
    one = hvd.on_gpu(np.arange(6.0).reshape(6, 1) + rank)
    return [
        hvd.allreduce(one, op=hvd.Max).get().tolist(),
        hvd.allgather(one).get().tolist(),
        hvd.broadcast(one, root_rank=1).get().tolist(),
        hvd.reducescatter(one, op=hvd.Sum).get().tolist(),
        hvd.allreduce(hvd.on_gpu(np.arange(3)), op=hvd.Sum).get().tolist(),
    ]


def break_check(rank: int, how: str) -> None:
    """Make NCCL fail on a rank, or on all (-1)."""
    checked_plane.CHECK_WITHIN = BOUND if how in ("never", "apart") else PATIENCE
    if rank not in (-1, context.engine().rank):
        return
    communicator: Any = fake_nccl.FakeCommunicator
    if how == "wrong":

        def wrong(self: Any, source: int, target: int, count: int, dtype: Any, op: Any, stream: int) -> None:
            def spoil() -> None:
                bytes_at(target, 4).view(np.float32)[0] += 1

            _allreduce(self, source, target, count, dtype, op, stream)
            self.device._put(stream, spoil)

        communicator.allreduce = wrong
    elif how == "raises":

        def raises(self: Any, *arguments: Any) -> None:
            raise NcclFailed("NCCL: unhandled cuda error (nvlink is down)")

        communicator.allreduce = raises
    elif how == "never":
        communicator._send = lambda self, member, content: self.aborted.wait() and None
    elif how == "apart":
        communicator.settled = lambda self: False
    else:
        communicator._send = lambda self, member, content: signal.raise_signal(getattr(signal, how))


_allreduce = fake_nccl.FakeCommunicator.allreduce


def interrupted_total(rank: int) -> str:
    """Run a collective whose check waits on a rank that gets Ctrl-C meanwhile."""
    if context.engine().rank == rank:
        communicator: Any = fake_nccl.FakeCommunicator

        def interrupt(self: Any, member: int, content: bytes) -> None:
            communicator._send = real
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.aborted.wait()

        real, communicator._send = communicator._send, interrupt
    try:
        total()
    except KeyboardInterrupt:
        return "interrupted"
    except AbortedError:
        return "aborted"
    return ""


def end_generation() -> None:
    context.engine().withdraw("the generation ends", 0)


def next_total() -> float:
    """Run a collective in the generation after the one that ends."""
    while True:
        try:
            return total()
        except AbortedError:
            continue


def left_over() -> list[str]:
    """Leave the job; return the threads of planes that are still there."""
    context.shutdown()
    return [one.name for one in threading.enumerate() if one.name.startswith(("hvdlab-cuda", "hvdlab-nccl"))]


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "hosts", "choice", "given", "plane"),
    [
        ("xyz", "aaa", "auto", "cuda/auto", NCCL),
        ("xyz", "aab", "auto", "cuda/nccl", NCCL),
        ("xxx", "aaa", "auto", "cuda/auto", IPC),
        ("xyz", "aaa", "nccl", "cuda/nccl", NCCL),
        ("xxx", "aaa", "nccl", "cuda/nccl", NCCL),  # the real one refuses that in its check
        ("xxx", "aaa", "ipc", "cuda/ipc", IPC),
    ],
)
def test_the_gpus_of_the_ranks_make_the_plane_and_no_variable_does(
    three: Ranks, gpus: str, hosts: str, choice: str, given: str, plane: str
) -> None:
    assert three.run(join, gpus, hosts, choice, timeout=PATIENCE) == [given] * 3
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    for planes, _, lines in three.run(shown):
        assert planes == (plane,)
        assert lines == []


@pytest.mark.parametrize(
    ("gpus", "plane"),
    [("xyz", f"shm, {NCCL} (link unknown)"), ("xxx", f"shm, {IPC} (same GPU)")],
)
def test_the_row_of_the_panel_names_the_plane_that_was_checked(three: Ranks, gpus: str, plane: str) -> None:
    three.run(join, gpus, timeout=PATIENCE)
    three.run(keep_records)
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    recording = Recording()
    members = tuple(Member(rank, pid=100 + rank, host="a", plane="auto") for rank in range(3))
    recording.take_membership(Membership(members=members, expected=(0, 1, 2)))
    for rank, events in enumerate(three.run(records)):
        recording.feed(rank, encode(rank, events))
    assert [row["plane"] for row in rank_rows(recording)] == [plane] * 3


@pytest.mark.parametrize(
    ("gpus", "hosts", "why"),
    [
        ("xxy", "aaa", "does not reach the memory"),  # shared by two, and the third has another
        ("xxy", "aab", "ranks 0,1 share GPU xxxxxxxx, which NCCL refuses"),
    ],
)
def test_ranks_of_which_some_share_a_gpu_go_through_the_host_where_no_plane_connects_them(
    three: Ranks, gpus: str, hosts: str, why: str
) -> None:
    three.run(join, gpus, hosts, timeout=PATIENCE)
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    found = three.run(shown)
    for rank, (planes, links, lines) in enumerate(found):
        assert planes == ("",)
        assert links == [THROUGH_HOST]
        assert len(lines) == (rank == 0)
    (line,) = found[0][2]
    assert line.startswith("CUDA tensors of ranks 0-2 are copied through the host")
    assert why in line


def test_ranks_that_share_some_gpus_work_in_place_where_the_gpus_reach_each_other(three: Ranks) -> None:
    three.run(reaching)
    three.run(join, "xxy", timeout=PATIENCE)
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    assert three.run(shown)[0][0] == (IPC,)


def reaching() -> None:
    arrays()
    FakeCuda.reaches = lambda self, identity: True  # type: ignore[method-assign]


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (1, "wrong", "on rank 1, GPU 0 (yyyyyyyy): 1 of 65536 sums were wrong, the first 7 in place of 6"),
        (0, "wrong", "on rank 0, GPU 0 (xxxxxxxx): 1 of 65536 sums were wrong"),
        (
            2,
            "raises",
            "on rank 2, GPU 0 (zzzzzzzz): the GPU of this rank: NCCL: unhandled cuda error (nvlink is down)",
        ),
        (-1, "raises", "NCCL: unhandled cuda error (nvlink is down)"),
        (2, "never", "it did not end within 1 s"),
        (0, "never", "it did not end within 1 s"),
        (1, "apart", "it did not end within 1 s"),
    ],
)
def test_after_a_check_that_fails_all_ranks_go_through_the_host_and_one_sentence_says_why(
    three: Ranks, rank: int, how: str, words: str
) -> None:
    three.run(join, "xyz", timeout=PATIENCE)
    three.run(break_check, rank, how)
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    found = three.run(shown)
    assert [planes for planes, _, _ in found] == [("",)] * 3
    assert [links for _, links, _ in found] == [[THROUGH_HOST]] * 3
    assert [len(lines) for _, _, lines in found] == [1, 0, 0]
    assert words in found[0][2][0]
    assert "until one of them is restarted: `cuda/nccl` failed its check" in found[0][2][0]
    assert three.run(total, 10) == [3.0] * 3
    everywhere = three.run(everything)
    assert everywhere[0][0] == [[float(number + 2)] for number in range(6)]
    assert everywhere[0][2] == [[float(number + 1)] for number in range(6)]
    assert everywhere[2][3] == [[15.0], [18.0]]
    assert [len(one[1]) for one in everywhere] == [18] * 3
    assert everywhere[1][4] == [0, 3, 6]


def test_a_group_of_gpus_that_failed_is_not_checked_again(three: Ranks, tmp_path: Path) -> None:
    three.run(join, "xyz", timeout=PATIENCE)
    three.run(break_check, 1, "raises")
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    three.run(end_generation, ranks=[2])
    three.catch_up()
    assert three.run(next_total) == [3.0] * 3
    assert len(list(tmp_path.glob("nccl-*"))) == 1, "communicators"
    found = three.run(shown)
    assert [planes for planes, _, _ in found] == [("",)] * 3
    assert [len(lines) for _, _, lines in found] == [1, 0, 0]


def test_a_group_is_checked_again_once_a_rank_has_been_replaced(three: Ranks) -> None:
    three.run(join, "xyz", timeout=PATIENCE)
    three.run(break_check, 1, "raises")
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    three.kill(1)
    three.respawn(1)
    three.run(join, "xyz", ranks=[1], timeout=PATIENCE)
    assert three.run(next_total, timeout=PATIENCE) == [3.0] * 3
    assert [planes for planes, _, _ in three.run(shown)] == [(NCCL,)] * 3


@pytest.mark.parametrize("how", ["never", "raises", "apart"])
def test_a_check_that_fails_leaves_no_thread_behind(three: Ranks, how: str) -> None:
    three.run(join, "xyz", timeout=PATIENCE)
    three.run(break_check, 1, how)
    three.run(total, timeout=PATIENCE)
    assert three.run(left_over) == [[]] * 3


def test_a_rank_that_dies_within_the_check_ends_the_collective_and_the_others_go_on(three: Ranks) -> None:
    three.run(join, "xyz", timeout=PATIENCE)
    three.run(break_check, 1, "SIGKILL")
    outcomes = three.start(total).outcomes(PATIENCE)
    assert [type(outcome) for outcome in outcomes] == [AbortedError, RankGone, AbortedError]
    assert three.run(total, ranks=[0, 2]) == [2.0, 2.0]
    assert [planes for planes, _, _ in three.run(shown, ranks=[0, 2])] == [(NCCL,)] * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_an_interrupt_within_the_check_ends_the_collective_and_the_next_is_checked_again(
    three: Ranks, rank: int
) -> None:
    three.run(join, "xyz", timeout=PATIENCE)
    found = three.start(interrupted_total, rank).outcomes(PATIENCE)
    assert found == ["interrupted" if other == rank else "aborted" for other in range(3)]
    three.catch_up()
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    assert [(planes, lines) for planes, _, lines in three.run(shown)] == [((NCCL,), [])] * 3


# -- decisions --------------------------------------------------------------------------------------------------------


def test_ranks_that_all_stay_on_the_first_of_several_gpus_are_told_the_line_once(three: Ranks) -> None:
    three.run(join, "xxx", "aaa", "auto", 4, timeout=PATIENCE)
    assert three.run(total, timeout=PATIENCE) == [3.0] * 3
    three.run(total, timeout=PATIENCE)
    found = three.run(shown)
    assert [len(lines) for _, _, lines in found] == [1, 0, 0]
    assert (
        "ranks 0-2 all use the first of 4 GPUs: run torch.cuda.set_device(hvd.local_rank()" in found[0][2][0]
    )
    assert found[0][0] == (IPC,)


def test_what_a_member_publishes_is_read_as_it_was() -> None:
    mine = checked_plane.MemberGpu("ab" * 16, 7, 3, 8, {("cuda/nccl", "x", "y"): "why"})
    assert checked_plane.MemberGpu.decode(mine.encode()) == mine
    assert json.loads(mine.encode())[2] == 3


class HeldPlane:
    """Plane whose allreduce of one member begins once it may."""

    def __init__(self, context: PlaneContext) -> None:
        self.context, self.may_go = context, threading.Event()

    def start_allreduce(self, *given: Any) -> None:
        self.may_go.wait()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_report_that_comes_at_the_bound_changes_no_decision(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    with simulated_gpu(monkeypatch) as gpu:
        store = Store()
        plane: Any = HeldPlane(PlaneContext(0, 0, 0, 1, (0,), ("here",), store))
        monkeypatch.setattr(checked_plane, "CHECK_WITHIN", 0.0 if is_late else PATIENCE)
        check = checked_plane.PlaneCheck(plane, store, gpu, 0)
        members = [checked_plane.MemberGpu("xyz", 7, 0, 1, {})]
        if not is_late:
            plane.may_go.set()
        first = check.decision(PATIENCE, members)
        plane.may_go.set()
        check.join(PATIENCE)
        assert not check.is_alive()
        assert check.decision(PATIENCE, members) == first
        assert first == ("on rank 0, GPU 0 (xyz): it did not end within 0 s" if is_late else "")
        assert gpu._streams == {}

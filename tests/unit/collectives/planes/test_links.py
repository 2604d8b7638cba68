"""Links between GPUs, with a made-up library: only its answers are shown. Real GPUs: ``tests/gpu/test_links.py``."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping

import pytest

from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.planes.base import (
    NVLINK,
    PCIE,
    PEER,
    SAME_GPU,
    THROUGH_HOST,
    links_text,
    plane_text,
    planes_text,
)
from hvdlab.collectives.planes.gpu.gpu_plane import links_between
from hvdlab.collectives.protocol import messages as m

MINE, SECOND, THIRD, FOURTH = (uuid.UUID(int=number).hex for number in range(1, 5))
OK, NOT_SUPPORTED, STATUS_UNKNOWN = 0, 5, 6
READ, BY_NVLINK = 0, 2


class NvmlError(Exception):
    pass


class Nvml:
    """Used part of ``pynvml``: by GPU its answers to the two questions about the way to it; a handle is a UUID."""

    NVMLError = NvmlError
    NVML_P2P_STATUS_OK, NVML_P2P_STATUS_UNKNOWN = OK, STATUS_UNKNOWN
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_NVLINK = READ, BY_NVLINK

    def __init__(self, answers: Mapping[str, tuple[int, int]], kind: str = "GPU") -> None:
        self._answers, self._kind = answers, kind
        self.sessions = self.begun = 0

    def nvmlInit(self) -> None:
        self.sessions += 1
        self.begun += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, text: str) -> str:
        kind, _, name = text.partition("-")
        if kind != self._kind:
            raise NvmlError("Not Found")
        return uuid.UUID(name).hex

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:
        assert one == MINE
        if other not in self._answers:
            raise NvmlError("Not Supported")
        return self._answers[other][index == READ]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml({SECOND: (OK, OK), THIRD: (NOT_SUPPORTED, OK)})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_ranks_are_told_by_what_reaches_them(nvml: Nvml) -> None:
    found = links_between(MINE, [MINE, SECOND, THIRD, SECOND, FOURTH], [1, 2, 3, 4, 5])
    assert found == {SAME_GPU: (1,), NVLINK: (2, 4), PCIE: (3,), PEER: (5,)}
    assert links_text(found) == "same GPU: 1; NVLink: 2,4; PCIe: 3; peer access, link unknown: 5"
    assert nvml.sessions == 0


def test_the_library_is_not_needed_where_ranks_share_a_gpu(nvml: Nvml) -> None:
    assert links_between(MINE, [MINE, MINE], [0, 2]) == {SAME_GPU: (0, 2)}
    assert nvml.begun == 0


@pytest.mark.parametrize(
    ("answers", "link"),
    [
        ((OK, OK), NVLINK),
        ((NOT_SUPPORTED, OK), PCIE),
        ((STATUS_UNKNOWN, OK), PEER),
        ((NOT_SUPPORTED, NOT_SUPPORTED), PEER),
        ((NOT_SUPPORTED, STATUS_UNKNOWN), PEER),
    ],
)
def test_what_the_library_does_not_know_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, int], link: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml({SECOND: answers}))
    assert links_between(MINE, [SECOND], [1]) == {link: (1,)}


def test_without_the_library_the_link_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert links_between(MINE, [SECOND, MINE], [1, 2]) == {SAME_GPU: (2,), PEER: (1,)}


def test_instances_of_a_partitioned_gpu_have_another_name_for_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml({SECOND: (OK, OK)}, kind="MIG"))
    assert links_between(MINE, [SECOND], [1]) == {NVLINK: (1,)}


def test_links_are_those_of_one_generation() -> None:
    state = RankState(0)
    members = tuple(m.Member(rank, "host", 1) for rank in (0, 1))
    for generation in (1, 2):
        state.handle(m.Configure(0, generation, members, "shm", {}, device_planes={"cuda": "cuda/ipc"}), 0)
        assert state.sets[0].links == {}
        group = state.set_in(0, 1)
        assert (group is not None) == (generation == 1), "a plane of the last generation was late"
        if group is not None:
            group.links = {NVLINK: (1,)}
    assert state.set_in(7, 1) is None
    assert list(state.sets) == [0]


def test_the_size_of_chunks_is_that_of_one_generation() -> None:
    state = RankState(0)
    members = tuple(m.Member(rank, "host", 1) for rank in (0, 1))
    for generation in (1, 2):
        state.handle(m.Configure(0, generation, members, "shm", {}), 0)
        assert state.sets[0].chunk_bytes == 0
        state.sets[0].chunk_bytes = 1 << 20


def test_planes_are_shown_with_the_size_of_chunks() -> None:
    assert plane_text("shm", 0) == "shm"
    assert plane_text("shm", 512 * 1024) == "shm in chunks of 512 KiB"


def test_planes_are_shown_with_the_link() -> None:
    assert planes_text(["shm"], {}) == "shm"
    assert planes_text(["shm", "cuda/ipc"], {NVLINK: (1, 2)}) == "shm, cuda/ipc (NVLink)"
    assert planes_text(["shm"], {THROUGH_HOST: (1,)}) == "shm (CUDA tensors through the host)"
    assert planes_text([""], {}) == ""

"""Pieces of other processes' memory that the groups of a process share."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed, OpenedPieces


class Mapping:
    """GPU that refuses to map the memory at an address of a process a second time, as a driver may."""

    def __init__(self) -> None:
        self.mapped: dict[int, bytes] = {}
        self._addresses = itertools.count(4096, 4096)

    def open(self, handle: bytes) -> int:
        place = handle.partition(b" ")[0]
        if any(other.partition(b" ")[0] == place for other in self.mapped.values()):
            raise DeviceFailed("resource already mapped (CUDA_ERROR_ALREADY_MAPPED)")
        address = next(self._addresses)
        self.mapped[address] = handle
        return address

    def close(self, pointer: int) -> None:
        del self.mapped[pointer]


@pytest.fixture
def gpu() -> Mapping:
    return Mapping()


@pytest.fixture
def pieces(gpu: Mapping) -> OpenedPieces:
    return OpenedPieces(cast(Device, cast(Any, gpu)))


def test_groups_share_a_piece_until_the_last_one_releases_it(gpu: Mapping, pieces: OpenedPieces) -> None:
    first = pieces.open(7, 100, 1, b"100 first")
    second = pieces.open(7, 100, 1, b"100 first")
    assert first.pointer == second.pointer
    pieces.release(first)
    assert gpu.mapped == {second.pointer: b"100 first"}
    pieces.release(second)
    assert gpu.mapped == {}


def test_a_freed_piece_is_unmapped_for_its_successor_whatever_group_has_it_open(
    gpu: Mapping, pieces: OpenedPieces
) -> None:
    old = pieces.open(7, 100, 1, b"100 first")
    new = pieces.open(7, 100, 2, b"100 second")
    assert gpu.mapped == {new.pointer: b"100 second"}
    assert old.pointer == 0
    pieces.release(old)
    assert gpu.mapped == {new.pointer: b"100 second"}, "the other group's piece is not the new one"
    pieces.release(new)
    assert gpu.mapped == {}


def test_processes_may_have_memory_at_the_same_address(gpu: Mapping, pieces: OpenedPieces) -> None:
    one, other = pieces.open(7, 100, 1, b"7:100 a"), pieces.open(8, 100, 1, b"8:100 b")
    assert one.pointer != other.pointer
    pieces.release(one)
    assert list(gpu.mapped) == [other.pointer]


def test_what_the_driver_refuses_is_raised_and_may_be_tried_again(gpu: Mapping, pieces: OpenedPieces) -> None:
    held = pieces.open(7, 100, 1, b"100 first")
    with pytest.raises(DeviceFailed, match="already mapped"):
        pieces.open(7, 164, 2, b"100 within it")
    pieces.release(held)
    assert pieces.open(7, 164, 2, b"100 within it").pointer in gpu.mapped

"""Sums of float16 and bfloat16 over eight members lose no more than one rounding, on every plane and way.

The members are threads of this process, except for MPI's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conformance.planes import inputs, rounding_cases
from conformance.planes.actor import PlaneActor, plane_actor
from conformance.planes.harness import WorkerGroup
from conformance.planes.planes_under_test import PLANES, shm_memory
from hvdlab.collectives.engine.operations import run_small
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.planes.base import KeyValue, PlaneContext
from hvdlab.collectives.reduce import FoldScratch, conversion_of, register_conversion
from hvdlab.collectives.types import SUM, DType, OpKind
from hvdlab.torch.adapter import register_conversions

MEMBERS = 8
COUNTS = [40, 3, 5000]
HALVES = [DType.F16, DType.BF16]
THREADED = {
    "shm": ("hvdlab.collectives.planes.shm:ShmPlane", "aaaaaaaa"),
    "gloo": ("hvdlab.collectives.planes.gloo:GlooPlane", "abcdefgh"),
    "two hosts": ("hvdlab.collectives.planes.hierarchical:HierarchicalPlane", "aaaabbbb"),
    "three uneven hosts": ("hvdlab.collectives.planes.hierarchical:HierarchicalPlane", "aaabbbbc"),
}


class Store(KeyValue):
    """Rendezvous store within this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(key)
            return self._values[key]


def together(plane: str, case: Callable[[PlaneActor], int]) -> list[int]:
    """Run a case on all members, each in a thread of its own."""
    target, hosts = THREADED[plane]
    store = Store()
    finished = threading.Barrier(MEMBERS)
    fd = os.memfd_create("rounding") if plane == "shm" else -1
    if fd >= 0:
        os.ftruncate(fd, shm_memory(MEMBERS, {}))

    def member(index: int) -> int:
        actor = plane_actor(
            target,
            PlaneContext(
                0, 1, index, MEMBERS, tuple(range(MEMBERS)), tuple(hosts), store=store,
                memory_fd=os.dup(fd) if fd >= 0 else -1,
            ),
        )  # fmt: skip
        assert isinstance(actor, PlaneActor)
        try:
            actor.connect(20)
            result = case(actor)
            # Gloo's plane finds the sockets that it disconnects in its process, and this one has those of all members.
            finished.wait()
            return result
        except BaseException:
            actor.abort()
            finished.abort()
            raise
        finally:
            actor.close()

    try:
        with ThreadPoolExecutor(MEMBERS) as pool:
            return list(pool.map(member, range(MEMBERS)))
    finally:
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.label)
@pytest.mark.parametrize("plane", THREADED)
def test_eight_members_round_once(plane: str, dtype: DType) -> None:
    checksums = together(plane, lambda actor: rounding_cases.sums(actor, dtype, COUNTS))
    assert len(set(checksums)) == 1


def test_eight_members_round_once_with_mpi() -> None:
    plane = next(p for p in PLANES if p.name == "mpi")
    if reason := plane.unavailable():
        pytest.skip(reason)
    group = WorkerGroup(plane, MEMBERS)
    try:
        group.configure()
        for dtype in HALVES:
            checksums = group.run("conformance.planes.rounding_cases:sums", dtype=dtype, counts=COUNTS)
            assert len(set(checksums)) == 1
    finally:
        group.close()


@pytest.mark.parametrize("converted_by", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.label)
def test_what_travels_with_the_negotiation_is_rounded_once(dtype: DType, converted_by: str) -> None:
    before = {half: conversion_of(half) for half in HALVES}
    if converted_by == "torch":
        register_conversions()
    try:
        rng = np.random.default_rng(3)
        wide = rng.normal(size=(MEMBERS, 500)) * np.exp2(rng.integers(-6, 7, size=(MEMBERS, 500)))
        parts = [inputs.from_float64(row, dtype) for row in wide]
        request = Request(OpKind.ALLREDUCE, input=parts[0], dtype=dtype, reduction=SUM)
        out = run_small(request, tuple(part.tobytes() for part in parts), FoldScratch()).output
        assert isinstance(out, np.ndarray)
    finally:
        for half, conversion in before.items():
            register_conversion(half, conversion)
    addends = np.stack([inputs.to_float64(part, dtype) for part in parts])
    rounding_cases.rounded_once(inputs.to_float64(out, dtype), addends.sum(0), np.abs(addends).sum(0), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.label)
def test_the_measure_finds_sums_that_are_rounded_each_time(dtype: DType) -> None:
    """The test above can fail."""
    rng = np.random.default_rng(3)
    parts = [inputs.from_float64(row, dtype) for row in rng.normal(size=(MEMBERS, 500))]
    addends = np.stack([inputs.to_float64(part, dtype) for part in parts])
    total = addends[0]
    for addend in addends[1:]:
        total = inputs.to_float64(inputs.from_float64(total + addend, dtype), dtype)
    with pytest.raises(AssertionError):
        rounding_cases.rounded_once(total, addends.sum(0), np.abs(addends).sum(0), dtype)

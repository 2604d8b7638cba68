"""Buffers that the ``mpi`` plane gives to MPI, which can read and write it long after an operation was given up."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import numpy as np
from hvdlab.collectives.types import SUM, DType
from hvdlab.collectives.planes.base import PhaseTimes, PlaneAborted, PlaneContext
from hvdlab.collectives.planes.mpi import MpiPlane

COUNT = 1000


class Never:
    def Test(self):
        plane.abort()
        return False


class Comm:
    '''Keeps what it is given, and completes nothing.'''

    def __getattr__(self, name):
        def begin(*args):
            flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            given.extend(x for x in flat if isinstance(x, np.ndarray))
            return Never()

        return begin


def operations(plane, arrays):
    one, both, whole = arrays
    f32 = DType.F32
    return {
        "allreduce": lambda: plane.allreduce([one], [one], f32, SUM, PhaseTimes()),
        "allgather": lambda: plane.allgather(one, [COUNT, COUNT], both, PhaseTimes()),
        "broadcast as root": lambda: plane.broadcast(one, 0, PhaseTimes()),
        "broadcast": lambda: plane.broadcast(one, 1, PhaseTimes()),
        "reducescatter": lambda: plane.reducescatter(both, [COUNT, COUNT], one, f32, SUM, PhaseTimes()),
        "alltoall": lambda: plane.alltoall(both, [COUNT, COUNT], [COUNT, COUNT], whole, PhaseTimes()),
    }


def refused(operation):
    try:
        operation()
    except PlaneAborted:
        return
    raise AssertionError("it was not refused")


for name in operations(None, (None, None, None)):
    plane = MpiPlane(PlaneContext(0, 1, 0, 2, (0, 1), ("a", "a"), None, -1, "", {}))
    plane._comm, given = Comm(), []
    users = [np.ones(COUNT, np.float32), np.ones(2 * COUNT, np.float32), np.ones(2 * COUNT, np.float32)]
    refused(operations(plane, users)[name])
    assert given, name
    assert not any(np.shares_memory(mine, array) for mine in users for array in given), name
    before = [array.copy() for array in given]
    zeros = [np.zeros_like(array) for array in users]
    for again in operations(plane, zeros).values():
        refused(again)
    # As bytes: MPI's result goes to memory that is not initialised, and a NaN in it would equal nothing.
    assert [array.tobytes() for array in before] == [array.tobytes() for array in given], name
    print(name)
"""


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py")
def test_mpi_has_memory_of_its_own_that_nothing_writes_to_after_an_abort() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 6

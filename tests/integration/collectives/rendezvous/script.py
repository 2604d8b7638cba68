"""A training script as users write them: it knows of no launcher. See ``test_foreign_launchers.py``."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError


def total(value: float = 1.0) -> float:
    return float(hvd.allreduce(np.full(1000, value), op=hvd.Sum)[0])


def begun(rank: int) -> Path:
    """Return the file by which a rank says that it has submitted its collective."""
    return Path(os.environ["TMPDIR"], f"begun.{rank}")


def total_that_others_see(rank: int) -> float:
    """Return the sum over all ranks. Others see when this rank has submitted it, and waits."""
    handle = hvd.allreduce_async(np.full(1000, 1.0), op=hvd.Sum)
    begun(rank).touch()
    return float(hvd.synchronize(handle)[0])


def wait_for_others(rank: int, size: int) -> None:
    """Wait until all other ranks wait for this one."""
    others = [begun(other) for other in range(size) if other != rank]
    while not all(path.exists() for path in others):
        time.sleep(0.001)
    for path in others:
        path.unlink()


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended that is no child."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process = os.pidfd_open(pid)
        select.select([process], [], [])
        os.close(process)


def train() -> None:
    engine = context.init()
    place = (
        engine.rank,
        engine.size,
        engine.local_rank,
        engine.local_size,
        engine.cross_rank,
        engine.cross_size,
    )
    # In one write, so that the ranks' lines do not get mixed.
    os.write(1, f"{place} {total(engine.rank)} {engine.plane()}\n".encode())


def again() -> None:
    for _ in range(4):
        engine = context.init()
        assert total() == engine.size
        context.shutdown()
    context.init()
    os.write(1, f"{total()}\n".encode())


def fail() -> None:
    """Rank 1 fails while the others wait for it."""
    engine = context.init()
    if engine.rank == 1:
        wait_for_others(engine.rank, engine.size)
        sys.exit(7)
    try:
        total_that_others_see(engine.rank)
    except AbortedError as error:
        os.write(1, f"{error}\n".encode())
        raise


def first_dies() -> None:
    """Rank 0, which started the coordinator, is killed while the others wait for it; they go on."""
    engine = context.init()
    if engine.rank == 0:
        wait_for_others(engine.rank, engine.size)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        total_that_others_see(engine.rank)
    except AbortedError as error:
        os.write(1, f"{error}\n".encode())
    os.write(1, f"{total()}\n".encode())


def coordinator_dies() -> None:
    """Rank 0 kills the coordinator while the others wait for it; all go on."""
    engine = context.init()
    total()
    # They must have left it, otherwise it would be lost there and be over here.
    left = [Path(os.environ["TMPDIR"], f"left.{rank}") for rank in range(engine.size)]
    left[engine.rank].touch()
    if engine.rank == 0:
        while not all(path.exists() for path in left):
            time.sleep(0.001)
        os.kill(coordinator(), signal.SIGKILL)
    lost, found, incarnations = 0, 0.0, 0.0
    while incarnations < engine.size:  # ranks of one host need no coordinator to agree
        try:
            given = np.array([1.0, float(engine.incarnation)])
            found, incarnations = map(float, hvd.allreduce(given, op=hvd.Sum))
        except AbortedError:
            lost += 1
    left[engine.rank].unlink()
    os.write(1, f"{found} {engine.incarnation} {lost < 2}\n".encode())


def coordinator() -> int:
    """Return the process that rank 0 has started."""
    found = context._context.found
    assert found is not None
    assert found.coordinator is not None
    return found.coordinator.pid


def coordinator_dies_last() -> None:
    """End rank 0, and then kill the coordinator."""
    engine = context.init()
    others = engine.add_process_set([rank for rank in range(engine.size) if rank])
    pids = np.array([os.getpid(), coordinator()] if engine.rank == 0 else [0, 0])
    first, its_coordinator = map(int, hvd.broadcast(pids, 0))
    if engine.rank == 0:
        return
    wait_for_end(first)
    if engine.rank == 1:
        os.kill(its_coordinator, signal.SIGKILL)
    while True:
        try:
            hvd.allreduce(np.ones(3), process_set=others)
        except AbortedError as error:
            if "for good" in str(error):
                os.write(1, f"{error}\n".encode())
                return


def first_leaves() -> None:
    """Rank 0 has nothing more to do and ends; the others go on."""
    engine = context.init()
    others = engine.add_process_set([rank for rank in range(engine.size) if rank])
    first = int(hvd.broadcast(np.array([os.getpid()]), 0)[0])
    if engine.rank == 0:
        return
    wait_for_end(first)
    os.write(1, f"{float(hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=others)[0])}\n".encode())


def late(seconds: float) -> None:
    """Rank 0 comes late."""
    if context_rank() == 0:
        time.sleep(seconds)
    train()


def absent(rank: int) -> None:
    """A rank ends without coming."""
    if context_rank() != rank:
        train()


def restarted() -> None:
    """The first attempt fails."""
    engine = context.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    total()
    if attempt == 0 and engine.rank == 1:
        sys.exit(3)
    os.write(1, f"attempt {attempt}: {total()}\n".encode())


def context_rank() -> int:
    from hvdlab.collectives.rendezvous.launchers import detect

    launched = detect(os.environ)
    assert launched is not None
    return launched.rank


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(float, sys.argv[2:]))

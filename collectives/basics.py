"""Joining and leaving the world, a rank's place in it, breakpoints, and the abilities of this installation: alike in all frameworks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hvdlab.collectives import context
from hvdlab.collectives.context import own_number, shown_number
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes import registry
from hvdlab.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    is_communicator,
    is_registered,
    register,
    set_id,
    world_ranks,
)
from hvdlab.collectives.types import OpKind

_DYNAMIC = "dynamic"


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Join the world that this process was started for, and wait until all its ranks are there.

    In a process that no launcher or pool started as a rank this makes a world of one. Called again, it only registers
    process sets that are not registered yet.

    Args:
        comm: The ranks that the world should have, as a list or as a communicator of mpi4py. They must be all that
            were started, in their order.
        process_sets: Process sets to register, the same on all ranks. (Horovod's ``"dynamic"`` changes nothing: sets
            can always be added later.)

    Raises:
        UnsupportedError: ``comm`` is only a part of the ranks that were started.
        InvalidRequestError: ``process_sets`` is no list of process sets.
        StartError: The coordinator does not answer, or ranks are missing; the text names them.
    """
    # Before joining: an id that users' code has set before is not of this world.
    wanted = [each for each in _sets(process_sets) if not is_registered(each)]
    joined_before = context.is_initialized()
    context.init()
    try:
        _check_world(comm)
        for process_set in wanted:
            register(process_set)
    # Without this, a rank whose init() has failed would stay in the world, as one for which the others wait.
    except BaseException:
        if not joined_before:
            context.shutdown()
        raise


def _sets(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> list[ProcessSet]:
    if isinstance(process_sets, str):
        if process_sets.lower() != _DYNAMIC:
            raise InvalidRequestError(
                f"process_sets= takes a list of process sets, or 'dynamic', not {process_sets!r}."
            )
        return []
    sets = [given if isinstance(given, ProcessSet) else ProcessSet(given) for given in process_sets or ()]
    for number, each in enumerate(sets):
        if any(each.ranks == other.ranks for other in sets[:number]):
            raise InvalidRequestError(
                f"process_sets= has two process sets of the ranks {each.ranks}; give one of them, and use it for both."
            )
    return sets


def _check_world(comm: Sequence[int] | Any | None) -> None:
    if comm is None or (isinstance(comm, Sequence) and not comm):
        return
    there = [shown_number(rank) for rank in context.engine().ranks()]
    wanted = world_ranks(comm) if is_communicator(comm) else ProcessSet(comm).ranks
    if wanted != there:
        raise UnsupportedError(
            f"hvd.init(comm=...) names the ranks {wanted}, but {there} were started, and a world can't be a part of "
            "them. Start as many ranks as are wanted, or give process_sets=[...] for collectives of some."
        )


def shutdown() -> None:
    """Leave the world; collectives in flight fail. ``init()`` can be called again. Does nothing if not initialized.

    In a cell the rank stays in its pool: collectives in flight go on, and ranks that wait for this one get an error as soon as its cell ends.
    """
    context.shutdown()


def is_initialized() -> bool:
    """Return whether ``init()`` was called, and ``shutdown()`` not since."""
    return context.is_initialized()


def rank() -> int:
    """Return this process's number in the world, from 0.

    It stays the same when other ranks come or go, so that there can be gaps. With ``HVDLAB_RANK_NUMBERS=consecutive``, as in
    elastic jobs of ``hvdlab run``, it is always below :func:`size`, and changes when a rank is lost that came before this one.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return own_number()


def size() -> int:
    """Return the number of ranks in the world now.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return context.engine("hvd.size()").size


def local_rank() -> int:
    """Return this rank's number among those on its host, from 0.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return context.engine("hvd.local_rank()").local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return context.engine("hvd.local_size()").local_size


def cross_rank() -> int:
    """Return the number of this rank's host among the hosts, from 0.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return context.engine("hvd.cross_rank()").cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank of this one's local number.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return context.engine("hvd.cross_size()").cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks, as far as this rank knows.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    engine = context.engine("hvd.is_homogeneous()")
    return engine.local_size * engine.cross_size == engine.size


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called it.

    Args:
        process_set: The ranks that take part; all by default. A rank outside may not call it.

    Raises:
        InvalidRequestError: The process set is not registered, or this rank is not in it. Nothing was sent.
        NotInitializedError: ``init()`` was not called.
        AbortedError: A member died, failed, left or was interrupted before it arrived. The group can go on.
    """
    context.engine("hvd.barrier()").run(Request(OpKind.BARRIER, process_set=set_id(process_set)))


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write the spans of all ranks from now on to a Chrome trace, which Perfetto opens. Call it on one rank.

    Args:
        file_path: File to create, or to overwrite.
        mark_cycles: Whether to mark the coordinator's decisions; by default not.

    Raises:
        OSError: The file can't be written.
        NotInitializedError: ``init()`` was not called.
    """
    context.engine("hvd.start_timeline()").start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Complete the file that :func:`start_timeline` began. Does nothing if there is none.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    context.engine("hvd.stop_timeline()").stop_timeline()


# -- abilities of this installation -----------------------------------------------------------------------------------


def _offers(plane: str) -> bool:
    # In this order: the first imports nothing, and spares the import where the answer is no.
    return registry.missing(plane) is None and registry.why_unavailable(plane) is None


def mpi_built() -> bool:
    """Return whether the mpi plane can be used in this process: mpi4py is installed, and an MPI launcher started it."""
    return _offers("mpi")


def mpi_enabled() -> bool:
    """Return whether the world's collectives go through MPI, be it only between hosts.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return "mpi" in context.engine("hvd.mpi_enabled()").planes()


def mpi_threads_supported() -> bool:
    """Return whether MPI was initialized for calls from several threads; false where there is no MPI.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    context.engine("hvd.mpi_threads_supported()")
    if not mpi_built():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Return whether the gloo plane can be used in this process."""
    return _offers("gloo")


def gloo_enabled() -> bool:
    """Return whether the world's collectives go through Gloo, be it only between hosts.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return "gloo" in context.engine("hvd.gloo_enabled()").planes()


def nccl_built() -> bool:
    """Return whether collectives of CUDA tensors can go through NCCL in this process. Loads NCCL's library, if it is installed."""
    return _offers("cuda/nccl")


def cuda_built() -> bool:
    """Return whether collectives in this process can work on CUDA tensors where they are. (Otherwise they are copied through host memory.)"""
    return _offers("cuda/ipc")


def rocm_built() -> bool:
    """Return false: there is no plane for ROCm."""
    return False


def ddl_built() -> bool:
    """Return false: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return false: Intel's oneCCL is not supported."""
    return False


# -- the debugger ------------------------------------------------------------------------------------------------------


def breakpoint(
    ranks: int | Collection[int] | None = None,
    when: object = None,
    *,
    header: str | None = None,
) -> None:
    """Stop in the debugger, as the built-in ``breakpoint()`` does, on some ranks only or when something holds.

    In a rank of a pool the debugger's prompt comes in the notebook, and no clock of a stall runs meanwhile. The other ranks go on
    until they wait for this one.

    Args:
        ranks: Ranks to stop on, one or several; by default every rank. A process that is not initialized is rank 0.
        when: Stop only if this is true; if it is a function, it is called without arguments, on these ranks only.
        header: Text that the debugger shows when it stops.
    """
    if ranks is not None and _own_rank() not in ({ranks} if isinstance(ranks, int) else ranks):
        return
    if when is not None and not (when() if callable(when) else when):
        return
    hook: Callable[..., Any] = sys.breakpointhook
    if hook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):
        import pdb  # noqa: T100  # only here: its import takes longer than all others of this module

        debugger = pdb.Pdb()
        if header is not None:
            debugger.message(header)
        # In the caller's frame: the user's own line, not this one.
        debugger.set_trace(sys._getframe(1))
    elif header is not None and hook is not sys.__breakpointhook__:
        hook(header=header)
    else:
        hook()


def _own_rank() -> int:
    return context.engine().rank if context.is_initialized() else 0

"""A broadcast of MPI's: for ranks of several hosts that an MPI launcher started."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError

_POLL_SECONDS = 0.001


class Broadcast:
    """See :class:`~hvdlab.collectives.bootstrap.board.Board`. The card is broadcast once, and all ranks take part in that.

    Raises:
        StartError: MPI can't be started in time.
    """

    def __init__(self, rank: int, size: int, deadline: Deadline) -> None:
        self._deadline = deadline
        self._data: bytes | None = None
        self._comm = _initialized(deadline)
        if (self._comm.rank, self._comm.size) != (rank, size):
            raise StartError(
                f"The launcher says rank {rank} of {size}, but mpi4py's MPI rank {self._comm.rank} of "
                f"{self._comm.size}: mpi4py was built for another MPI than the launcher's. Install the mpi4py that "
                "goes with it, or set HVDLAB_RENDEZVOUS_DIR to a directory that all hosts share."
            )

    def publish(self, data: bytes) -> None:
        self._complete(self._comm.Ibcast(np.array([len(data)], np.int64), 0))
        self._complete(self._comm.Ibcast(np.frombuffer(data, np.uint8).copy(), 0))

    def read(self, seconds: float) -> bytes | None:
        if self._data is None:
            length = np.zeros(1, np.int64)
            self._complete(self._comm.Ibcast(length, 0))
            received = np.zeros(int(length[0]), np.uint8)
            self._complete(self._comm.Ibcast(received, 0))
            self._data = received.tobytes()
        return self._data

    def _complete(self, request: Any) -> None:
        while not request.Test():
            if self._deadline.expired:
                raise StartError(
                    f"MPI did not bring rank 0's announcement to all within {self._deadline.seconds:g} s: some ranks "
                    "have not come to hvd.init(), or have ended."
                )
            time.sleep(_POLL_SECONDS)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def withdraw(self) -> None:
        """Nothing is left lying about."""

    def close(self) -> None:
        """MPI itself goes on: the data plane may use it."""

    @property
    def place(self) -> str:
        return "MPI's broadcast"

    @property
    def advice(self) -> str:
        return "If the hosts do not reach each other's addresses, choose others by HVDLAB_ADDRESS."


def _initialized(deadline: Deadline) -> Any:
    """MPI's world.

    ``MPI_Init`` returns when all ranks have called it, and mpi4py would keep the interpreter locked meanwhile. So a thread of its own
    calls it, past mpi4py; that thread is left behind if time is over.
    """
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StartError(f"mpi4py can't load its MPI library: {error}") from error
    if not MPI.Is_initialized():
        library = ctypes.CDLL(MPI.__file__)
        provided = ctypes.c_int()
        arguments = (None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(provided))
        thread = threading.Thread(
            target=library.MPI_Init_thread, args=arguments, name="hvdlab-mpi-init", daemon=True
        )
        thread.start()
        thread.join(deadline.remaining())
        if thread.is_alive():
            raise StartError(
                f"MPI did not start within {deadline.seconds:g} s: some ranks have not come to hvd.init(), or have "
                "ended without telling mpiexec."
            )
    return MPI.COMM_WORLD

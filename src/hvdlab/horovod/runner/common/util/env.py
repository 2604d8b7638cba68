"""``horovod.runner.common.util.env``: this process's rank and the number of ranks, as the launcher has set them."""

from __future__ import annotations

import os

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""Variables that launchers set together: ``hvdlab run`` and horovodrun, Open MPI, and MPICH with its relatives."""


def get_env_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, before ``hvd.init()``.

    Returns:
        The rank, from 0, and the number of ranks; 0 and 1 in a process that no launcher has started.

    Raises:
        RuntimeError: One of two variables that belong together is missing.

    Example:
        >>> import os
        >>> os.environ.update(HOROVOD_RANK="3", HOROVOD_SIZE="8")
        >>> get_env_rank_and_size()
        (3, 8)
    """
    for rank_variable, size_variable in _PAIRS:
        rank, size = os.environ.get(rank_variable), os.environ.get(size_variable)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            there, missing = (
                (rank_variable, size_variable) if rank is not None else (size_variable, rank_variable)
            )
            raise RuntimeError(f"{there} is set, but {missing} is not: a launcher sets both of them.")
    return 0, 1

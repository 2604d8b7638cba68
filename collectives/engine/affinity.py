"""Binding the engine's threads to a core."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from hvdlab.collectives.errors import InvalidRequestError


def bind(cores: Sequence[int], local_rank: int, threads: Iterable[threading.Thread]) -> None:
    """Bind threads to the core that is meant for this local rank; those they start are bound with them.

    Raises:
        InvalidRequestError: There is no core for this rank in ``cores``, or the machine has none of that number.
    """
    if local_rank >= len(cores):
        raise InvalidRequestError(
            f"HOROVOD_THREAD_AFFINITY names {len(cores)} cores, and this is local rank {local_rank}; name one for each."
        )
    core = cores[local_rank]
    for thread in threads:
        if thread.native_id is None or not thread.is_alive():
            continue
        try:
            os.sched_setaffinity(thread.native_id, {core})
        except OSError as error:
            raise InvalidRequestError(
                f"HOROVOD_THREAD_AFFINITY: core {core} can't be used by local rank {local_rank}: {error.strerror}."
            ) from None

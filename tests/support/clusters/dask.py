"""A real Dask cluster of several workers on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def running(workers: int, threads: int) -> Iterator[Any]:
    """Yield a cluster, of which this process has a client, until the end of the block."""
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=threads, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster),
    ):
        yield cluster

"""A real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def started(nodes: int, **node: Any) -> Any:
    """Return a cluster of so many equal nodes, which this process is not connected to; ``shutdown()`` ends it.

    Ray gives a node 30 s to start, which no setting changes: on a busy machine it may take a second try.
    """
    # Ray warns of its next version's behaviour; an actor without GPUs keeps the variable as it is.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Its workers would yield to all other processes of a machine on which other tests run.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its name for Ray
    from ray.cluster_utils import Cluster

    for attempt in range(3):
        cluster = Cluster()
        try:
            cluster.add_node(**node, include_dashboard=False)
            for _ in range(nodes - 1):
                cluster.add_node(**node)
            cluster.wait_for_nodes()
            return cluster
        except Exception:
            cluster.shutdown()
            if attempt == 2:
                raise
    raise AssertionError


@contextlib.contextmanager
def connected(nodes: int, **node: Any) -> Iterator[Any]:
    """Yield a cluster of so many equal nodes, which this process is connected to, until the end of the block."""
    import ray

    cluster = started(nodes, **node)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
    finally:
        cluster.shutdown()

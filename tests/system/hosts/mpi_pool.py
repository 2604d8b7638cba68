"""A pool by mpiexec on two hosts, with all that passes the first host's cable: ``python mpi_pool.py HOSTS``.

Runs in the first host's network; prints its findings, in JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.launch import mpi
from hvdlab.launch.hosts import Host

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.network.sniffer import Sniffer
from support.pool_probe import PoolProbe

SUM = """\
import os
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
engine = context.init()
(float(hvd.allreduce(np.full(1, 1.0 + engine.rank), op=hvd.Sum)[0]), "HVDLAB_TOKEN" in os.environ)
"""


SECRETS: list[str] = []
"""Files that were made on the hosts for the pool's secret."""


class ListedSecret(mpi.SecretOnHosts):
    """A secret on hosts whose file is listed: another test's pool may have one in the same directory."""

    def __init__(self, hosts: Sequence[Host], shell: Sequence[str], secret: str) -> None:
        super().__init__(hosts, shell, secret)
        SECRETS.append(self.path)


def main(hosts: str) -> dict[str, Any]:
    mpi.SecretOnHosts = ListedSecret  # type: ignore[misc]  # a subclass
    sniffer = Sniffer()
    try:
        pool = Pool.start(2, launcher="mpi", hosts=hosts, timeout=90)
        token = PoolProbe(pool).coordinator.token
        try:
            found: dict[str, Any] = {"values": list(pool.run(SUM))}
        finally:
            pool.stop()
    finally:
        seen = sniffer.close()
    halves = (token[:32].encode(), token[32:].encode())  # it may be cut in two
    return {
        **found,
        "variables": b"HVDLAB_COORDINATOR" in seen,
        "token": any(half in seen for half in halves),
        "secrets": SECRETS,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

"""Run by ``test_under_mpi.py`` with mpiexec, hosts and expected planes: the first collective is one of a process set, the others come later."""

from __future__ import annotations

import os
import sys

import numpy as np

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.system import HOST_VARIABLE

INDEX_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
LARGE = 50_000  # elements: more than travels with the negotiation


def main() -> None:
    hosts, of_set, of_world = sys.argv[1:]
    number = next(int(os.environ[name]) for name in INDEX_VARIABLES if name in os.environ)
    os.environ["HVDLAB_RANK"] = str(number)
    os.environ[HOST_VARIABLE] = hosts[number]
    engine = context.init()
    chosen = engine.add_process_set([0, 1])
    if engine.rank < 2:
        total = hvd.allreduce(np.full(LARGE, engine.rank + 1.0), op=hvd.Sum, process_set=chosen)
        assert (total == 3).all()
        assert engine.plane(chosen) == of_set
    # The others say nothing to MPI before the set has finished.
    hvd.barrier()
    whole = hvd.allreduce(np.full(LARGE, 1.0), op=hvd.Sum)
    assert (whole == engine.size).all()
    assert engine.plane() == of_world
    context.shutdown()


if __name__ == "__main__":
    main()

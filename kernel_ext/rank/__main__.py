"""``python -m hvdlab.kernel_ext.rank``: a rank that a launcher of ipyparallel's (MPI, SSH, Slurm, …) starts.

Takes the options of ``ipengine``. Rank and size come from the launcher's environment (:mod:`hvdlab.collectives.settings` has
the variables that our own launchers set) unless ``HVDLAB_RANK`` names the rank; without either the coordinator gives out the ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping

from hvdlab.collectives.rendezvous.launchers import detect


def foreign_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the sizes and ranks that a foreign launcher's variables give; empty without such a launcher.

    What the launcher does not say, such as the number of hosts, is left out. Raises ``InvalidRequestError`` for
    variables that make no sense.
    """
    launched = detect(environ)
    if launched is None:
        return {}
    found = {
        ("RANK", "HVDLAB_RANK", "HOROVOD_RANK"): launched.rank,
        ("WORLD_SIZE", "HVDLAB_SIZE", "HOROVOD_SIZE"): launched.size,
        ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"): launched.local_rank,
        ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"): launched.local_size,
    }
    return {name: str(value) for names, value in found.items() if value is not None for name in names}


def main() -> int:
    faulthandler.enable()
    for name, value in foreign_sizes(os.environ).items():
        os.environ.setdefault(name, value)
    from hvdlab.kernel_ext.rank.program import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

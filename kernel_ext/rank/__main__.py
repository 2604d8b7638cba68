"""``python -m hvdlab.kernel_ext.rank``: a rank that a launcher of ipyparallel's (MPI, SSH, Slurm, …) starts.

Takes the options of ``ipengine``. Rank and size come from the launcher's environment unless ``HVDLAB_RANK`` names the
rank; without either the coordinator gives out the ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from hvdlab.kernel_ext.environment import foreign_sizes


def main() -> int:
    faulthandler.enable()
    for name, value in foreign_sizes(os.environ).items():
        os.environ.setdefault(name, value)
    from hvdlab.kernel_ext.rank.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

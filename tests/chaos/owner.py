"""A process that trains on a pool of its own until it is killed: ``python owner.py RANKS PLANE MAILBOX [NAME]``.

With a name the pool is kept under it. Prints on one line its ranks' memory (JSON) once they train.
"""

from __future__ import annotations

import json
import sys

from chaos.campaign import Sink
from hvdlab.kernel_ext.notebook.pool import Pool


def main() -> None:
    size, plane, mailbox = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    pool = Pool.start(size, plane=plane, keep=sys.argv[4] if len(sys.argv) > 4 else None)
    order = {"victim": -2, "phase": "", "steps": 10**9, "at": -1, "spot": "", "plane": plane}
    assert pool.cluster is not None
    setup = f"from chaos.victim import Training\ntraining = Training(0, {mailbox!r})\ntraining.memory()"
    memory = pool.run(setup)
    run = pool.start_run(f"training.run({order!r})", out=Sink())
    print(json.dumps({rank: memory[rank] for rank in memory.ranks}), flush=True)
    run.wait()


if __name__ == "__main__":
    main()

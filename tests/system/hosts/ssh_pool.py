"""A pool over ssh whose agent on the second host is killed: ``python ssh_pool.py FIRST SECOND SHELL``.

Runs on the first host; prints its findings, in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hvdlab.kernel_ext.notebook.pool import Pool

SUM = """\
import os, socket
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
engine = context.init()
total = float(hvd.allreduce(np.full(1, 1.0 + engine.rank), op=hvd.Sum)[0])
(socket.gethostname(), engine.local_rank, engine.local_size, engine.cross_rank, total)
"""
KILL_THE_AGENT = """\
import os, psutil, time
if os.environ["RANK"] == "2":
    fork_server = psutil.Process(os.getppid())
    fork_server.parent().kill()
time.sleep(600)
"""


def main(first: str, second: str, shell: str) -> dict[str, Any]:
    hosts, options = f"{first}:2,{second}:2", {"shell": shell}
    pool = Pool.start(4, launcher="ssh", hosts=hosts, launcher_options=options, timeout=90)
    try:
        found: dict[str, Any] = {"before": list(pool.run(SUM))}
        pool.run("kept = 41")
        dying = pool.start_run(KILL_THE_AGENT, ranks=[2, 3]).wait(60)
        found["deaths"] = {rank: death.reason for rank, death in dying.deaths.items()}
        found["lost"] = dict(pool.lost)
        found["repaired"] = pool.repair()
        found["after"] = list(pool.run(SUM))
        found["kept"] = list(pool.run("globals().get('kept')"))
        found["status"] = [(status.rank, status.host, status.state) for status in pool.status()]
        return found
    finally:
        pool.stop()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

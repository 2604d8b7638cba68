"""A pool over ssh whose second host is cut off, and comes back: ``python cut_pool.py FIRST SECOND SHELL``.

Runs on the first host. Writes a line when the cable is to be pulled, and when the cut ranks are lost and a cell runs that they don't get; reads one
when the cable is pulled, and when it is back.
Prints its findings, in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hvdlab.kernel_ext.notebook.pool import Pool

START = """\
import os
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
engine = context.init()
kept = np.random.default_rng(engine.rank).standard_normal(1000)
(os.getpid(), float(kept.sum()))
"""
KEPT = "(os.getpid(), float(kept.sum()))"
SUM = "float(hvd.allreduce(np.full(1, 1.0 + engine.rank), op=hvd.Sum)[0])"


def main(first: str, second: str, shell: str) -> dict[str, Any]:
    hosts, options = f"{first}:2,{second}:2", {"shell": shell}
    pool = Pool.start(4, launcher="ssh", hosts=hosts, launcher_options=options, timeout=90)
    try:
        found: dict[str, Any] = {"before": list(pool.run(START))}
        print("cut", flush=True)
        sys.stdin.readline()
        running = pool.start_run("1")
        pool.client.wait_for(lambda now: {2, 3} <= set(now.missing), 60)
        print("lost", flush=True)
        sys.stdin.readline()
        found["ok"] = running.wait(60).ok
        found["after"] = list(pool.run(KEPT))
        found["sum"] = list(pool.run(SUM))
        found["lost"] = dict(pool.lost)
        return found
    finally:
        pool.stop()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

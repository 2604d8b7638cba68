"""A pool over ssh whose ranks are behind relays, of which one is killed: ``python relayed_pool.py FIRST SECOND SHELL``.

Runs on the first host; prints what was found, in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hvdlab.kernel_ext.pool import Pool

START = """\
import contextlib, os, pathlib, signal
import numpy as np
from hvdlab.collectives import api, context
from hvdlab.collectives.errors import AbortedError

engine = context.init()
kept = [engine.rank]

def total(value):
    return float(np.asarray(api.synchronize(api.allreduce_async(np.full(3, value), "x", op=api.Sum)))[0])

def relay():
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"\\0-m\\0hvdlab.collectives.relay\\0" in (place / "cmdline").read_bytes():
                return int(place.name)
"""
STATE = "[kept, not engine._endpoint.secure, total(1.0)]"
WAIT = "import time\ntotal(1.0) if engine.rank else time.sleep(600)"
KILL = """\
generation, steps = engine.generation, 0
while True:
    if steps == 20 and engine.rank == 3:
        os.kill(relay(), signal.SIGKILL)
    steps += 1
    try:
        # What is lost for some ranks may have been completed for others, which then wait in the next one: all have one name.
        if total(float(engine.generation != generation)) == engine.size:
            break
    except AbortedError as error:
        if error.cause.kind != "coordinator_lost":
            raise
"""


def main(first: str, second: str, shell: str) -> dict[str, Any]:
    hosts, options = f"{first}:2,{second}:2", {"shell": shell}
    pool = Pool.start(4, launcher="ssh", hosts=hosts, launcher_options=options, timeout=90)
    try:
        pool.run(START)
        found: dict[str, Any] = {"before": list(pool.run(STATE))}
        waiting = pool.start_run(WAIT)
        waiting.interrupt()
        found["interrupted"] = {rank: error.ename for rank, error in waiting.wait(60).errors.items()}
        found["ok"] = pool.start_run(KILL).wait(60).ok
        found["after"] = list(pool.run(STATE))
        found["lost"] = dict(pool.lost)
        dying = pool.start_run("if engine.rank == 3: os.kill(os.getpid(), signal.SIGKILL)\ntotal(1.0)").wait(
            60
        )
        found["deaths"] = list(dying.deaths)
        found["repaired"] = pool.repair()
        pool.run(START, ranks=[3])
        found["again"] = list(pool.run(STATE))
        return found
    finally:
        pool.stop()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

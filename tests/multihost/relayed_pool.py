"""A pool over ssh whose ranks are behind relays, of which one is killed: ``python relayed_pool.py FIRST SECOND SHELL``.

Runs on the first host; prints what was found, in JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hvdlab.kernel_ext.pool import Pool
from relayed_ranks import BEGIN, LOSE_RELAY, STATE

WAIT = "import time\ntotal('x') if engine.rank else time.sleep(600)"


def main(first: str, second: str, shell: str) -> dict[str, Any]:
    hosts, options = f"{first}:2,{second}:2", {"shell": shell}
    pool = Pool.start(4, launcher="ssh", hosts=hosts, launcher_options=options, timeout=90)
    try:
        pool.run(BEGIN)
        found: dict[str, Any] = {"before": list(pool.run(STATE))}
        waiting = pool.start_run(WAIT)
        waiting.interrupt()
        found["interrupted"] = {rank: error.ename for rank, error in waiting.wait(60).errors.items()}
        found["ok"] = pool.start_run(LOSE_RELAY).wait(60).ok
        found["after"] = list(pool.run(STATE))
        found["lost"] = dict(pool.lost)
        dying = pool.start_run("if engine.rank == 3: os.kill(os.getpid(), signal.SIGKILL)\ntotal('x')").wait(
            60
        )
        found["deaths"] = list(dying.deaths)
        found["repaired"] = pool.repair()
        pool.run(BEGIN, ranks=[3])
        found["again"] = list(pool.run(STATE))
        return found
    finally:
        pool.stop()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

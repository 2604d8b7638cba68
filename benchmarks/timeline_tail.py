"""How soon a timeline file that is being written holds an operation: the delay for a reader that tails it.

    python benchmarks/timeline_tail.py --json benchmarks/results/timeline_tail.json

The time is that from the return of the collective on the last rank until the file has it on disk; the file is looked at
every 2 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from hvdlab.kernel_ext.notebook.pool import Pool

SETUP = """\
import time
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
hvd.allreduce(np.ones(4), "warm")
"""


def delays(pool: Pool, path: Path, count: int) -> list[float]:
    """Return seconds from each operation's end to its place in the file."""
    found = []
    for number in range(count):
        run = pool.start_run(
            f"hvd.allreduce(np.ones(4), 'tail{number}.'); end = time.monotonic(); time.sleep(0.5); end"
        )
        at = None
        while not run.done:
            if at is None and f"tail{number}." in path.read_text():
                at = time.monotonic()
            time.sleep(0.002)
        results = run.wait()
        found.append((time.monotonic() if at is None else at) - max(results[rank] for rank in results.ranks))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Pool.start(given.ranks) as pool:
        pool.run(SETUP)
        path = pool.start_timeline(Path(directory, "t.json"))
        found = delays(pool, path, given.count)
        pool.stop_timeline()
    result = {
        "benchmark": "timeline_tail",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "ranks": given.ranks,
        "operations": given.count,
        "median_s": round(statistics.median(found), 3),
        "worst_s": round(max(found), 3),
    }
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

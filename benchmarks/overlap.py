"""Gain of reducing blocks within hosts while the network works on others, where a network costs the cores nothing.

::

    python benchmarks/overlap.py --rate 10e9 --delay 0.0001 --json benchmarks/results/overlap.json

Four ranks on two simulated hosts of this machine reduce by the hierarchical plane. Between hosts nothing is sent: in place of the outer
plane's allreduce a rank waits for as long as a cable of ``--rate`` bits per second, which two columns share, would take for the bytes, and
twice ``--delay``. So memory's part is measured and the network's is not; a real network takes part of the cores as well, the more of them
the fewer there are. Whole tensors and blocks of each of ``--blocks`` bytes take turns; a figure is the median over the rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.planes.hierarchical import HierarchicalPlane
from hvdlab.collectives.system import HOST_VARIABLE
from support.ranks.resident import Ranks

HOSTS = "aabb"
COLUMNS = 2


def join() -> None:
    """Put this rank on a simulated host."""
    os.environ[HOST_VARIABLE] = HOSTS[int(os.environ["HVDLAB_RANK"])]
    context.init()


def measure(nbytes: int, block_bytes: int, rate: float, delay: float) -> float:
    """Return on a rank the seconds of one allreduce."""

    def waits(ins: Any, *_: object) -> None:
        # A ring of two sends each byte of a slice once in each direction.
        time.sleep(2 * delay + COLUMNS * ins[0].nbytes * 8 / rate)

    for plane in (each for each in gc.get_objects() if isinstance(each, HierarchicalPlane)):
        plane._block_bytes = block_bytes
        if plane._outer is not None:
            plane._outer.allreduce = waits  # type: ignore[method-assign]
    source = np.ones(nbytes // 4, np.float32)
    hvd.barrier()
    start = time.perf_counter()
    hvd.allreduce(source, "measured", op=hvd.Sum)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=10e9, help="bits per second")
    parser.add_argument("--delay", type=float, default=0.0001, help="seconds, in each direction")
    parser.add_argument(
        "--sizes", default="4,16,64", type=lambda s: [int(part) << 20 for part in s.split(",")], help="in MiB"
    )  # fmt: skip
    parser.add_argument("--blocks", default="1,4,16", help="sizes of blocks in MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    blocks = {"whole": 0, **{f"{each} MiB": int(each) << 20 for each in given.blocks.split(",")}}
    found: dict[str, dict[str, float]] = {}
    with Ranks(len(HOSTS), init=False, imports=["torch"]) as ranks:
        ranks.run(join, timeout=60)
        ranks.run(measure, 1 << 20, 0, given.rate, given.delay, timeout=60)
        for nbytes in given.sizes:
            times: dict[str, list[float]] = {name: [] for name in blocks}
            for _ in range(given.rounds + 1):
                for name, block in blocks.items():
                    times[name].append(
                        max(ranks.run(measure, nbytes, block, given.rate, given.delay, timeout=60))
                    )
            found[str(nbytes)] = {
                name: round(statistics.median(taken[1:]) * 1e3, 2) for name, taken in times.items()
            }
            print(f"{nbytes:>9}  ms: {found[str(nbytes)]}", flush=True)
    if given.json:
        told = {
            "bits_per_second": given.rate,
            "delay_seconds": given.delay,
            "rounds": given.rounds,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "milliseconds": found,
        }
        given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    # Ranks look functions up in the module that this file is, which is not theirs named __main__.
    from overlap import main as run

    run()

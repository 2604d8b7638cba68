"""Gain of the hierarchical plane over flat Gloo where a network is the bottleneck: two hosts with slow cables.

    python benchmarks/between_hosts.py --rate 200M --delay 0.001 --json benchmarks/results/between_hosts.json

The hosts are network namespaces on this machine (``tests/support/network/namespaces.py``; needs root), their cables carry ``--rate`` bits per
second and delay each frame: so slow that the machine's cores are not the limit. Both worlds are there at the same
time and take turns. A figure is the median over the rounds of the slowest rank's time for one negotiated allreduce.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from support.network.namespaces import Network, SlowLink, slow_missing
from support.ranks.on_hosts import PORT, RanksOnHosts

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def measure(nbytes: int, rounds: int) -> list[float]:
    """Return on a rank the seconds of each round."""
    source = np.ones(max(1, nbytes // 4), np.float32)
    times = []
    for _ in range(rounds):
        hvd.barrier()
        start = perf_counter()
        hvd.allreduce(source, "measured", op=hvd.Sum)
        times.append(perf_counter() - start)
    assert context.engine().plane() in ("gloo", "hierarchical")
    return times


def number(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else float(text)


def main() -> None:
    if reason := slow_missing():
        raise SystemExit(reason)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=number, default=200e6, help="bits per second")
    parser.add_argument("--delay", type=float, default=0.001, help="seconds, in each direction")
    parser.add_argument("--per-host", type=int, default=2, help="ranks of each host")
    parser.add_argument(
        "--sizes", default="16384,1048576,4194304", type=lambda s: [int(p) for p in s.split(",")]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="", help="file for the medians")
    arguments = parser.parse_args()
    link = SlowLink(delay=arguments.delay, rate=arguments.rate)
    results: dict[str, dict[str, float]] = {}
    with Network(2, slow={1: link}) as network:
        flat = RanksOnHosts(network, arguments.per_host, env={"HVDLAB_PLANE": "gloo"})
        with flat, RanksOnHosts(network, arguments.per_host, env={"MASTER_PORT": str(PORT + 1)}) as nested:
            for nbytes in arguments.sizes:
                times: dict[str, list[float]] = {"gloo": [], "hierarchical": []}
                for _ in range(arguments.rounds + 1):
                    for name, world in (("gloo", flat), ("hierarchical", nested)):
                        rounds = world.run(measure, nbytes, 2, timeout=120)
                        times[name].append(max(mine[-1] for mine in rounds))
                medians = {name: statistics.median(taken[1:]) * 1e3 for name, taken in times.items()}
                results[str(nbytes)] = {name: round(ms, 2) for name, ms in medians.items()}
                ratio = medians["gloo"] / medians["hierarchical"]
                print(f"{nbytes:>9}  {results[str(nbytes)]} ms  gloo / hierarchical {ratio:.2f}", flush=True)
    if arguments.json:
        told = {
            "ranks": [arguments.per_host, arguments.per_host],
            "bits_per_second": arguments.rate,
            "delay_seconds": arguments.delay,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "milliseconds": results,
        }
        Path(arguments.json).write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    # Ranks look functions up in the module that this file is, which is not theirs named __main__.
    from between_hosts import main as run

    run()

"""Resources of a pool of idle ranks: processes, memory and listening ports, without and with ipyparallel's controller.

    python benchmarks/idle_pool.py                  # 4 ranks, 3 rounds
    python benchmarks/idle_pool.py --ranks 8 --rounds 5 --json idle.json

The controller comes with the first use of ``pool.cluster``, and the ranks then join it. Memory is the proportional set size of
all processes that this one has started. Each figure is the median over the rounds, each of which starts a pool of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import psutil

from hvdlab.kernel_ext.notebook.pool import Pool


def held() -> dict[str, float]:
    """Return the resources of the processes that this one has started."""
    family = psutil.Process().children(recursive=True)
    return {
        "processes": len(family),
        "MiB": sum(one.memory_full_info().pss for one in family) / 2**20,
        "ports": sum(link.status == psutil.CONN_LISTEN for one in family for link in one.net_connections("inet")),
        "connections": sum(link.status == psutil.CONN_ESTABLISHED for one in family for link in one.net_connections("inet")),
        "threads": sum(one.num_threads() for one in family),
    }  # fmt: skip


def one_round(ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """The same pool before and after its ranks have joined a controller."""
    with Pool.start(ranks) as pool:
        pool.run("1")
        without = held()
        client = pool.cluster.connect_client_sync()
        client.wait_for_engines(ranks, timeout=120)
        client.close()
        return without, held()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    rounds = [one_round(options.ranks) for _ in range(options.rounds)]
    medians = [
        {name: statistics.median(found[which][name] for found in rounds) for name in rounds[0][which]} for which in (0, 1)
    ]  # fmt: skip
    print(f"{options.ranks} ranks, {options.rounds} rounds")
    for name in medians[0]:
        print(f"{name:12} without controller {medians[0][name]:8.1f}   with {medians[1][name]:8.1f}")
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()

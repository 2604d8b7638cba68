"""Costs of ``%hvd_diff`` for a large model, from the call to the table.

    python benchmarks/diff.py                       # 1 GB of float32 parameters on each of 4 ranks, about a minute
    python benchmarks/diff.py --ranks 8 --megabytes 500 --json diff.json

The parameters are those of a language model's layers, plus a thousand small ones. A figure is the median of the rounds,
with the slowest beside it. ``hash`` is how fast one core makes fingerprints, by the hashes of the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from hvdlab.kernel_ext.notebook.pool import Pool

SETUP = """
import os, torch
rank, width = int(os.environ['RANK']), 1024
torch.manual_seed(0)
torch.set_num_threads(1)
large = max(1, ({elements} - 1000 * width) // (12 * width * width + 9 * width))
block = lambda: torch.nn.ModuleList([
    torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width),
    torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)])
with torch.no_grad():
    model = torch.nn.ModuleDict(dict(
        layers=torch.nn.ModuleList(block() for _ in range(large)),
        norms=torch.nn.ParameterList(torch.zeros(width) for _ in range(1000))))
sum(p.nbytes for p in model.parameters())
"""
CASES = {
    "all ranks agree": "",
    "one element differs on one rank": "if rank == size - 1: model['layers'][0][0].weight.data[3, 4] += 1",
    "all elements differ on one rank": "if rank == size - 1:\n    for p in model.parameters(): p.data.add_(1e-3)",
    "all elements differ on all ranks": "for p in model.parameters(): p.data.add_(1e-3 * (1 + rank))",
}


def measure(ranks: int, megabytes: int, rounds: int) -> dict[str, Any]:
    """Return seconds by case."""
    found: dict[str, Any] = {}
    with Pool.start(ranks, timeout=120) as pool:
        results = pool.run(SETUP.format(elements=megabytes * 1_000_000 // 4))
        found["bytes on each rank"] = results[0]
        pool.run(f"size = {ranks}")
        for case, change in CASES.items():
            if change:
                assert pool.run(change).ok
            pool.diff("rank")  # one-time work
            times = []
            for _ in range(rounds):
                begin = time.perf_counter()
                text = repr(pool.diff("model"))
                times.append(time.perf_counter() - begin)
            found[case] = {"seconds": round(statistics.median(times), 2), "worst": round(max(times), 2)}
            print(f"{case}: {found[case]}\n{text[:600]}\n", flush=True)
    return found


def hashes() -> dict[str, float]:
    """Return GB/s of one core."""
    data = os.urandom(4 << 20) * 16
    speeds = {}
    for name in ("sha1", "sha256", "blake2b", "md5"):
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            hashlib.new(name, data, usedforsecurity=False).digest()
            times.append(time.perf_counter() - begin)
        speeds[name] = round(len(data) / min(times) / 1e9, 2)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure %hvd_diff.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} before",
        "ranks": options.ranks,
        "hash": hashes(),
        **measure(options.ranks, options.megabytes, options.rounds),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Costs of bringing a gigabyte of variables to two new ranks, beside one broadcast of as many bytes.

    python benchmarks/syncing.py --json benchmarks/results/syncing.json      # two minutes, needs 8 GB of memory

A pool of two ranks, in a real Jupyter kernel, has a model of tensors. In each round it grows to four, ``%hvd_pool sync`` brings
the model to the two new ranks, all four broadcast one array of as many bytes in a cell, and the pool shrinks again. Both times are those of the cell,
from sending it to the kernel's last message about it; medians, and the first by the second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from cells import Kernel

TENSORS = 16
RANKS, NEW = 2, 2


def measure(rounds: int, mebibytes: int) -> dict[str, Any]:
    elements = (mebibytes << 20) // 4
    kernel = Kernel()
    times: dict[str, list[float]] = {"sync": [], "broadcast": []}
    try:
        kernel.run("%load_ext hvdlab")
        kernel.run(
            f"%%hvd_run -np {RANKS}\n"
            "import torch, hvdlab.torch as hvd\n"
            "hvd.init()\n"
            f"weights = [torch.full(({elements // TENSORS},), float(n)) for n in range({TENSORS})]"
        )
        for _ in range(rounds):
            kernel.run(f"%hvd_pool resize {RANKS + NEW}")
            times["sync"].append(kernel.run("%hvd_pool sync").seconds)
            kernel.run(
                "%%hvd_run\n"
                f"assert [float(w[-1]) for w in weights] == list(range({TENSORS}))\n"
                f"one = torch.empty({elements}) if hvd.rank() else torch.cat(weights)"
            )
            times["broadcast"].append(kernel.run("%%hvd_run\nhvd.broadcast_(one, 0);").seconds)
            kernel.run("%%hvd_run\ndel one")
            kernel.run(f"%hvd_pool resize {RANKS}")
        kernel.run("%hvd_pool stop")
    finally:
        kernel.close()
    sync, broadcast = (statistics.median(each) for each in times.values())
    return {
        "mebibytes": mebibytes,
        "rounds": rounds,
        "sync_s": round(sync, 3),
        "broadcast_s": round(broadcast, 3),
        "ratio": round(sync / broadcast, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = {
        "benchmark": "syncing",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        **measure(options.rounds, options.mebibytes),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

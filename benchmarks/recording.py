"""Costs of ``hvd.record()`` and ``hvd.watch_divergence()`` per step, on one rank.

    python benchmarks/recording.py                  # half a minute
    python benchmarks/recording.py --json recording.json

``record`` is measured for the inputs of a small and of a large batch; ``sample`` is the work of ``watch_divergence``
at each step, ``comparison`` its work every so many, without the collective. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hvdlab.torch as hvd


def median(work: Callable[[], object], rounds: int) -> float:
    """Return the median in microseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what recording costs.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hvd.init()
    small, large = torch.randn(32, 64), torch.randn(32, 3, 224, 224)
    layers = [torch.nn.Linear(512, 512) for _ in range(80)]  # 160 tensors, 84 MB
    model = torch.nn.Sequential(*layers)
    recorded = hvd.record(last=50)
    watch = hvd.watch_divergence(model, every=100)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} before",
        "record, 8 KB batch, us": median(lambda: recorded.batch(small, small), 300),
        "record, 19 MB batch, us": median(lambda: recorded.batch(large), 50),
        "sample of 160 tensors, us": median(watch._sample, 300),
        "comparison of 84 MB, us": median(watch._digests, 10),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    watch.close()
    recorded.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""Microseconds of processor time that a watched group needs to record one launch: its slot in the ring, and the line of code.

    python benchmarks/watched_launches.py [--calls 20000]

No ranks and no backend take part. ``record`` is the slot with shape, dtype and line of code; ``line`` is the search for the line alone; ``part`` is the search
for the part of a model, outside of a backward pass. Medians of 21 rounds; the rounds of the three take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from hvdlab.collectives.text import call_site
from hvdlab.torch.c10d.ddp_buckets import Buckets
from hvdlab.torch.c10d.launch_ring import COLLECTIVES, LaunchRing, LaunchSlot
from hvdlab.torch.c10d.operation_names import sharded_module

ROUNDS = 21


def rounds(calls: int) -> dict[str, float]:
    """Return the median microseconds of a call, by kind."""
    ring, tensor, buckets, options = LaunchRing(), torch.ones(64, 64), Buckets(), object()

    def record() -> None:
        described = tensor.shape, tensor.dtype
        ring.add(LaunchSlot(1, COLLECTIVES, 1, 1, "all_reduce", described, options, call_site(1), "", 0))

    def line() -> None:
        call_site(1)

    def part() -> None:
        if not sharded_module():
            buckets.text_of(tensor, None)

    kinds: dict[str, Callable[[], None]] = {"record": record, "line": line, "part": part}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, call in kinds.items():
            begin = time.thread_time_ns()
            for _ in range(calls):
                call()
            taken[name].append((time.thread_time_ns() - begin) / calls / 1000)
    return {name: round(statistics.median(times), 3) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=20_000, help="calls in each round")
    print(json.dumps(rounds(parser.parse_args().calls), indent=2))


if __name__ == "__main__":
    main()

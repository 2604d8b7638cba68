"""Collectives of ``torch.distributed`` on hvdlab beside the Gloo backend, on CPU.

    hvdlab run -np 2 python benchmarks/c10d.py --json c10d-2.json   # half a minute

The same ranks have a group of each backend, and these take turns in blocks of calls, so that whatever else the machine does
hits both. Printed, by rank 0, are minimum, lower quartile and median over all calls in microseconds, and the median over
blocks of hvdlab's time by Gloo's (below 1 hvdlab is quicker).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)

KIB, MIB = 1 << 10, 1 << 20
Call = Callable[[Any], object]


def _all_reduce(nbytes: int) -> Call:
    tensor = torch.ones(nbytes // 4)
    return lambda group: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def _all_gather(nbytes: int) -> Call:
    output = torch.ones(nbytes // 4)
    given = torch.ones(output.numel() // dist.get_world_size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    output = output[: given.numel() * dist.get_world_size()]
    return lambda group: gather(output, given, group=group)


def _reduce_scatter(nbytes: int) -> Call:
    output = torch.ones(nbytes // 4 // dist.get_world_size())
    given = torch.ones(output.numel() * dist.get_world_size())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda group: scatter(output, given, op=dist.ReduceOp.MAX, group=group)


CASES: dict[str, tuple[Callable[[int], Call], int, int]] = {
    # name: (what makes the call, bytes, calls in a block)
    "all_reduce 4 B": (_all_reduce, 4, 100),
    "all_reduce 4 KiB": (_all_reduce, 4 * KIB, 100),
    "all_reduce 1 MiB": (_all_reduce, MIB, 20),
    "all_reduce 16 MiB": (_all_reduce, 16 * MIB, 4),
    "all_reduce 64 MiB": (_all_reduce, 64 * MIB, 2),
    "all_gather_into_tensor 16 MiB": (_all_gather, 16 * MIB, 4),
    "reduce_scatter_tensor 16 MiB": (_reduce_scatter, 16 * MIB, 4),
}


def measure(call: Call, groups: dict[str, Any], blocks: int, calls: int) -> dict[str, Any]:
    """Microseconds of each call, in blocks that take turns, and what is printed of them."""
    times: dict[str, list[list[float]]] = {name: [] for name in groups}
    for group in groups.values():
        call(group)
    for block in range(blocks):
        for name in sorted(groups, reverse=bool(block % 2)):
            group, found = groups[name], []
            dist.barrier(group=group)
            for _ in range(calls):
                began = time.perf_counter_ns()
                call(group)
                found.append((time.perf_counter_ns() - began) / 1000)
            times[name].append(found)
    row: dict[str, Any] = {}
    for name, found in times.items():
        every = sorted(value for block in found for value in block)
        row[name] = [every[0], every[len(every) // 4], statistics.median(every)]
    ratios = [
        statistics.median(ours) / statistics.median(gloo)
        for ours, gloo in zip(times["hvdlab"], times["gloo"], strict=True)
    ]
    return {**row, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=10, help="blocks of each backend (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    dist.init_process_group("hvdlab")
    groups = {"hvdlab": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = {}
    for name, (make, nbytes, calls) in CASES.items():
        row = rows[name] = measure(make(nbytes), groups, options.blocks, calls)
        if dist.get_rank() == 0:
            shown = "  ".join(f"{each} " + " / ".join(f"{t:.0f}" for t in row[each]) for each in groups)
            print(f"{name:30} {shown}  ratio {row['ratio']:.2f}", flush=True)
    if dist.get_rank() == 0 and options.json is not None:
        found = {"ranks": dist.get_world_size(), "torch": torch.__version__, "microseconds": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

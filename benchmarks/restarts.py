"""Restart ranks of a pool one after the other while the other ranks live on, and record the crashes of the restarted ones.

    python benchmarks/restarts.py                              # 100 restarts of ranks whose tensors are on the CPU
    python benchmarks/restarts.py --device cuda --count 300 --json restarts.json

Every other rank is restarted by the pool, and those between are killed and replaced; after each restart all ranks reduce a tensor together. For each
failed start, and each rank that ended by itself, the result has the error and the rank's last output, which includes the Python stacks of a
segmentation fault. The exit code is 1 if there was such a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import HvdlabError
from hvdlab.kernel_ext.notebook.pool import Pool

REDUCE = """\
import torch, hvdlab.torch as hvd
hvd.init()
float(hvd.allreduce(torch.ones(1000, device={device!r}), op=hvd.Sum)[-1])
"""
DIE = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


class RestartFailed(Exception):
    """Error: a rank did not come back as it should; the message has the reason."""


def replace(pool: Pool, rank: int, *, by_death: bool) -> None:
    """Replace the process of a rank: kill it and repair the pool, or have the pool restart it. Raises ``HvdlabError``."""
    if by_death:
        pool.run(DIE, ranks=[rank])
        pool.repair()
    else:
        pool.restart([rank])


def reduce(pool: Pool, device: str) -> None:
    """Reduce a tensor on all ranks. Raises :class:`RestartFailed` if that fails, or comes out wrong."""
    results = pool.run(REDUCE.format(device=device))
    if results.root_cause is not None:
        raise RestartFailed(f"{results.root_cause.ename}: {results.root_cause.evalue}")
    if list(results) != [float(pool.size)] * pool.size:
        raise RestartFailed(f"the sum came out as {list(results)}")


def crash(pool: Pool, number: int, rank: int, error: Exception) -> dict[str, Any]:
    """Return the description of a restart that failed."""
    words = {str(each): pool.last_words(each) for each in pool.lost}
    return {
        "number": number,
        "rank": rank,
        "error": f"{type(error).__name__}: {error}",
        "lost": {str(each): reason for each, reason in pool.lost.items()},
        "last_words": words,
    }


def restarts(ranks: int, count: int, device: str, end: float) -> dict[str, Any]:
    """Restart ranks of a pool in turn, ``count`` times or until ``end`` (``time.monotonic()``). Returns the result."""
    crashes: list[dict[str, Any]] = []
    done = 0
    pool = Pool.start(ranks, plane="shm")
    try:
        reduce(pool, device)
        while done < count and time.monotonic() < end:
            rank, done = done % ranks, done + 1
            try:
                replace(pool, rank, by_death=done % 2 == 0)
                reduce(pool, device)
            except (HvdlabError, RestartFailed) as error:
                crashes.append(crash(pool, done, rank, error))
                print(f"restart {done} of rank {rank}: {error}", flush=True)
                pool.stop()
                pool = Pool.start(ranks, plane="shm")
                reduce(pool, device)
    finally:
        pool.stop()
    return {
        "benchmark": "restarts",
        "ranks": ranks,
        "device": device,
        "restarts": done,
        "crashes": crashes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--count", type=int, default=100, help="restarts (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop when they are over")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    os.environ.setdefault("HVDLAB_PRELOAD", "hvdlab.torch")
    end = time.monotonic() + 60 * options.minutes
    result = restarts(options.ranks, options.count, options.device, end)
    print(f"{result['restarts']} restarts, {len(result['crashes'])} crashes")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["crashes"]))


if __name__ == "__main__":
    main()

"""Memory of ranks and coordinator over many steps: does anything grow?

    python benchmarks/soak.py --steps 10000              # gradients, ragged gathers, small ones: some minutes
    python benchmarks/soak.py --load names --steps 100000  # each step a new tensor name
    python benchmarks/soak.py --load sets --steps 500     # 2,000 tensors in flight over 64 process sets

Prints resident megabytes of every process now and then, and at the end the growth between the first quarter and the
end in bytes per step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

SETS = 64  # process sets, in members that overlap
IN_FLIGHT = 2000  # submissions of a rank before it waits for any


def step_of_training() -> Callable[[int], None]:
    """Return a step of named, anonymous, small, large and ragged operations."""
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    rng = np.random.default_rng(0)
    rank, size = context.engine().rank, context.engine().size

    def step(number: int) -> None:
        handles = [
            hvd.allreduce_async(np.ones(int(n), np.float32), f"grad.{i}", op=hvd.Sum)
            for i, n in enumerate(rng.integers(1, 20_000, 8))
        ]
        hvd.allgather(np.ones((rank + number % 3, 2)))
        for handle in handles:
            assert np.asarray(hvd.synchronize(handle))[0] == size

    return step


def step_with_a_new_name() -> Callable[[int], None]:
    """Return a step of one tensor of a name that never was."""
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    size = context.engine().size

    def step(number: int) -> None:
        result = hvd.allreduce(np.ones(2, np.float32), f"loss of step {number}", op=hvd.Sum)
        assert np.asarray(result)[0] == size

    return step


def step_of_many_sets() -> Callable[[int], None]:
    """Return a step of tensors of many process sets, all in flight at once, each rank in an order of its own."""
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    engine = context.engine()
    members = [sorted({i % engine.size, (i // 2) % engine.size, 0}) for i in range(SETS)]
    sets = [(engine.add_process_set(ranks), ranks) for ranks in members]
    rng = np.random.default_rng(engine.rank)

    def step(number: int) -> None:
        handles = []
        for i in rng.permutation(IN_FLIGHT):
            id, ranks = sets[i % SETS]
            if engine.rank in ranks:
                x = np.full(7 + i % 50, i + engine.rank, np.float32)
                handles.append((i, ranks, hvd.allreduce_async(x, f"t{i}", op=hvd.Sum, process_set=id)))
        for i, ranks, handle in handles:
            assert np.asarray(hvd.synchronize(handle))[0] == sum(i + rank for rank in ranks)

    return step


LOADS = {"training": step_of_training, "names": step_with_a_new_name, "sets": step_of_many_sets}


def rank_main() -> None:
    """Run as a rank as many steps as its standard input asks for each time, and answers."""
    from hvdlab.collectives import context

    context.init()
    step = None
    number = 0
    for line in sys.stdin:
        load, count = json.loads(line)
        step = step or LOADS[load]()
        for _ in range(count):
            step(number)
            number += 1
        gc.collect()
        print("done", flush=True)
    context.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="training")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--looks", type=int, default=20, help="how often to look at memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main()
        return
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

    with CoordinatorProcess.start(size=given.ranks) as coordinator:
        env = {
            **os.environ,
            "HVDLAB_COORDINATOR": coordinator.address,
            "HVDLAB_TOKEN": coordinator.token,
            "OMP_NUM_THREADS": "1",
        }
        pipe, command = subprocess.PIPE, [sys.executable, __file__, "--rank"]
        ranks = [
            subprocess.Popen(command, env={**env, "HVDLAB_RANK": str(r)}, stdin=pipe, stdout=pipe, text=True)
            for r in range(given.ranks)
        ]
        rows = watch(
            given,
            [("coordinator", coordinator.pid), *((f"rank {r}", p.pid) for r, p in enumerate(ranks))],
            ranks,
        )
        for process in ranks:
            process.communicate(timeout=60)
    report = {"load": given.load, "ranks": given.ranks, "steps": given.steps, "resident_bytes": rows}
    quarter = rows[len(rows) // 4]
    growth = {
        who: round((rows[-1][who] - quarter[who]) / (rows[-1]["step"] - quarter["step"]), 1)
        for who in quarter
        if who not in ("step", "seconds")
    }
    print("growth after the first quarter, bytes per step:", growth)
    if given.json:
        given.json.write_text(json.dumps({**report, "growth_per_step": growth}, indent=1) + "\n")


def watch(
    given: argparse.Namespace, pids: list[tuple[str, int]], ranks: list[subprocess.Popen[str]]
) -> list[dict[str, float]]:
    """Let the ranks run in pieces, and look at everybody's memory after each."""
    rows: list[dict[str, float]] = []
    piece = max(1, given.steps // given.looks)
    begun = time.monotonic()
    done = 0
    while done < given.steps:
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps([given.load, piece]) + "\n")
            process.stdin.flush()
        for process in ranks:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit("a rank ended")
        done += piece
        row = {"step": done, "seconds": round(time.monotonic() - begun, 2)}
        row |= {who: psutil.Process(pid).memory_info().rss for who, pid in pids}
        rows.append(row)
        shown = ", ".join(f"{who} {row[who] / 2**20:.1f} MiB" for who, _ in pids)
        print(f"step {done:7} after {row['seconds']:6.1f} s: {shown}", flush=True)
    return rows


if __name__ == "__main__":
    main()

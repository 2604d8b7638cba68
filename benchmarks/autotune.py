"""Gain of HOROVOD_AUTOTUNE: steps with default settings beside steps of a world that has tuned itself, alternating.

    python benchmarks/autotune.py --json benchmarks/results/autotune.json   # about a minute and a half

Streams: ResNet-50's 161 gradients, and 1,000 tensors of 4 KiB, each submitted one after the other as a backward pass
does. Printed are the settings that were found, medians in milliseconds, and the median over turns of the default's
time by the tuned one's: above 1 tuning has gained something.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from allreduce import resnet50_shapes

STREAMS = ("ResNet-50 gradients", "1,000 tensors of 4 KiB")


def rank_main() -> None:
    """Run as a rank whose standard input names a stream and a number of steps; rank 0 answers with milliseconds."""
    import numpy as np

    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    engine = context.init()
    streams = {
        STREAMS[0]: [np.ones(shape, np.float32) for shape in resnet50_shapes()],
        STREAMS[1]: [np.ones(1024, np.float32) for _ in range(1000)],
    }
    for line in sys.stdin:
        stream, steps = json.loads(line)
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            handles = [
                hvd.allreduce_async_(x, f"{stream}.{i}", op=hvd.Max) for i, x in enumerate(streams[stream])
            ]
            for handle in handles:
                hvd.synchronize(handle)
            times.append((time.perf_counter() - begin) * 1000)
        if engine.rank == 0:
            print(json.dumps(times), flush=True)
    context.shutdown()


class World:
    """Rank processes of one world, tuned or not."""

    def __init__(self, ranks: int, log: Path | None, samples: int) -> None:
        from hvdlab.collectives.coordinator.process import CoordinatorProcess

        settings: dict[str, Any] = {}
        if log is not None:
            settings = {"autotune": True, "autotune_log": str(log), "autotune_max_samples": samples}
        self.coordinator = CoordinatorProcess.start(size=ranks, **settings)
        self.processes = []
        for rank in range(ranks):
            env = {
                **os.environ,
                "HVDLAB_COORDINATOR": self.coordinator.address,
                "HVDLAB_TOKEN": self.coordinator.token,
                "HVDLAB_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            }
            command, pipe = [sys.executable, __file__, "--rank"], subprocess.PIPE
            self.processes.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True))

    def run(self, stream: str, steps: int) -> list[float]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([stream, steps]) + "\n")
            process.stdin.flush()
        first = self.processes[0].stdout
        assert first is not None
        line = first.readline()
        if not line:
            raise SystemExit("rank 0 ended")
        times: list[float] = json.loads(line)
        return times

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(20)
        self.coordinator.close()


def compare(stream: str, ranks: int, samples: int, turns: int) -> dict[str, Any]:
    """Let a world tune itself on a stream, then let it take turns with one of default settings."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "autotune.csv"
        tuned, plain = World(ranks, log, samples), World(ranks, None, samples)
        try:
            steps = 0
            begun = time.monotonic()
            while not (log.exists() and "best" in log.read_text()):
                tuned.run(stream, 20)
                steps += 20
            tuning_seconds = time.monotonic() - begun
            lines = list(csv.DictReader(log.read_text().splitlines()))
            times: dict[str, list[float]] = {"default": [], "tuned": []}
            ratios = []
            worlds = [("default", plain), ("tuned", tuned)]
            for _, world in worlds:
                world.run(stream, 3)
            for _ in range(turns):
                found = {name: world.run(stream, 6) for name, world in worlds}
                for name, ms in found.items():
                    times[name] += ms
                ratios.append(statistics.median(found["default"]) / statistics.median(found["tuned"]))
                worlds.reverse()
        finally:
            tuned.close()
            plain.close()
    return {
        "best": {name: value for name, value in lines[-1].items() if name not in ("sample", "phase")},
        "tuning": {"samples": len(lines) - 1, "steps": steps, "seconds": round(tuning_seconds, 1)},
        "milliseconds": {name: round(statistics.median(ms), 3) for name, ms in times.items()},
        "gain": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main()
        return
    found = {}
    for stream in STREAMS:
        found[stream] = row = compare(stream, given.ranks, given.samples, given.turns)
        best = ", ".join(f"{name} {value}" for name, value in row["best"].items())
        print(f"{stream} ({given.ranks} ranks)\n    found after {row['tuning']['seconds']} s: {best}")
        print(
            f"    default {row['milliseconds']['default']:.2f} ms, tuned {row['milliseconds']['tuned']:.2f} ms, "
            f"gain {row['gain']:.2f} ({row['range'][0]:.2f} to {row['range'][1]:.2f})"
        )
    if given.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "ranks": given.ranks}
        given.json.write_text(json.dumps({**machine, "streams": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

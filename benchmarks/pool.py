"""Costs of ranks in a notebook, beside ipyparallel's cluster: time, memory, and processor time while idle.

    python benchmarks/pool.py                       # 8 ranks, 3 rounds, about four minutes
    python benchmarks/pool.py --ranks 4 --rounds 5 --json pool.json
    python benchmarks/pool.py --idle 60 --rounds 1

Each measurement is a fresh Jupyter kernel. The contenders take turns, so that a noisy neighbour hits both. A figure is
the median of the time from sending a cell to the kernel's last message about it. Memory is the proportional set size of
all processes that the kernel has started, once all of them are up; ``idle`` is the processor time that those and the
kernel use afterwards, in percent of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

CELL = "import torch\ntorch.ones(3).sum().item()"


class Kernel:
    """Fresh Jupyter kernel."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._directory = tempfile.TemporaryDirectory()
        self._manager.start_kernel(
            cwd=self._directory.name,
            env={**os.environ, "IPYTHONDIR": self._directory.name},
            stderr=open(os.devnull, "w"),  # noqa: SIM115
        )
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        assert self._manager.provisioner is not None
        self.process = psutil.Process(self._manager.provisioner.pid)  # type: ignore[attr-defined]

    def run(self, code: str) -> float:
        """Run a cell and return its seconds; ends the program if it fails."""
        begin = time.perf_counter()
        reply = self._client.execute_interactive(code, timeout=300, output_hook=lambda message: None)
        seconds = time.perf_counter() - begin
        if reply["content"]["status"] != "ok":
            sys.exit(f"{code}\n" + "\n".join(reply["content"]["traceback"]))
        return seconds

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)
        self._directory.cleanup()

    def memory(self) -> float:
        """Return proportional set size in MB of everything that the kernel has started."""
        return sum(p.memory_full_info().pss for p in self.process.children(recursive=True)) / 1e6

    def idle(self, seconds: float) -> float:
        """Return processor time of the kernel and all that it has started, in percent of one core."""
        family = [self.process, *self.process.children(recursive=True)]
        before = sum(map(processor_seconds, family))
        time.sleep(seconds)
        return (sum(map(processor_seconds, family)) - before) / seconds * 100


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process's threads, by the scheduler's clock.

    ``cpu_times()`` counts ticks of 10 ms, which hardly ever fall into the short turns of an idle process.
    """
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def ours(kernel: Kernel, ranks: int, pause: float) -> float:
    """Return the seconds from the cell after ``%load_ext`` (and a pause) to its end on all ranks."""
    loading = kernel.run("%load_ext hvdlab")
    time.sleep(pause)
    first = kernel.run(f"%%hvd_run -np {ranks}\n{CELL}")
    return first if pause else loading + first


def theirs(kernel: Kernel, ranks: int, pause: float) -> float:
    """Return the seconds from the first cell about ipyparallel to torch being imported on all engines."""
    return kernel.run(
        "import ipyparallel, logging\n"
        f"rc = ipyparallel.Cluster(n={ranks}, log_level=logging.ERROR).start_and_connect_sync()\n"
        f"rc[:].execute({CELL!r}, block=True)"
    )


def settle_ours(kernel: Kernel, ranks: int) -> None:
    """Wait until the ranks are ipyparallel's engines as well."""
    kernel.run(
        "from hvdlab.magics.extension import extension_of\n"
        "client = extension_of(get_ipython()).session.pool.cluster.connect_client_sync()\n"
        f"client.wait_for_engines({ranks}, timeout=60)\n"
        "client.close()"
    )


def settle_theirs(kernel: Kernel, ranks: int) -> None:
    """They are up already."""


def measure(ranks: int, rounds: int, idle: float) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, list[float]]] = {}

    def note(what: str, who: str, value: float) -> None:
        figures.setdefault(what, {}).setdefault(who, []).append(value)
        print(f"  {what:34} {who:12} {value:9.2f}", flush=True)

    contenders: list[tuple[str, Callable[..., float], Callable[..., None], float]] = [
        ("ipyparallel", theirs, settle_theirs, 0),
        ("hvdlab", ours, settle_ours, 0),
        ("hvdlab", ours, settle_ours, 5),
    ]
    for turn in range(rounds):
        for who, start, settle, pause in contenders:
            kernel = Kernel()
            try:
                what = "first cell, s" + (f" ({pause:g} s after loading)" if pause else "")
                note(what, who, start(kernel, ranks, pause))
                if pause and turn:
                    continue
                settle(kernel, ranks)
                time.sleep(3)
                note("memory, MB", who, kernel.memory())
                if turn == 0 and idle and not pause:
                    note("idle, % of a core", who, kernel.idle(idle))
            finally:
                if who == "ipyparallel":
                    kernel.run("rc.cluster.stop_cluster_sync()")
                kernel.close()
    return {
        what: {who: statistics.median(values) for who, values in by.items()} for what, by in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=30, help="seconds of idleness to measure; 0 for none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    medians = measure(options.ranks, options.rounds, options.idle)
    print()
    for what, by in medians.items():
        base = by.get("ipyparallel")
        against = f"   {by['hvdlab'] / base:.3f} of it" if base else ""
        print(f"{what:34}" + "".join(f"  {who} {value:.2f}" for who, value in by.items()) + against)
    if options.json:
        result: dict[str, Any] = {
            "benchmark": "pool",
            "ranks": options.ranks,
            "rounds": options.rounds,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "medians": medians,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

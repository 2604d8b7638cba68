"""Costs of a pool as it grows: its start, a cell, a collective, the death of a rank, its repair, memory.

    python benchmarks/many_ranks.py                              # 4, 16 and 64 ranks on this machine, some two minutes
    python benchmarks/many_ranks.py --ranks 128 --json many.json

A real Jupyter kernel has the pool; times are those from a cell's sending to the kernel's last message about it. The time of a
death is that from just before the rank sends itself SIGKILL, while all others wait for it, to the end of the cell with its report.
Medians of the rounds; the first death of a pool is given by itself, as ranks then import the modules of the report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

SETUP = "%%hvd_run\nimport os, signal, time\nimport numpy as np\nimport hvdlab.numpy as hvd\nhvd.init()"
REDUCE = """\
%%hvd_run
data = np.ones({elements}, np.float32)
hvd.barrier()
begin = time.perf_counter()
for _ in range({times}): hvd.allreduce(data, name='measured')
took = (time.perf_counter() - begin) / {times}
if hvd.rank() == 0: print('took', took)
"""
DEATH = """\
%%hvd_run
hvd.allreduce(np.ones(4))
if hvd.rank() == 1:
    time.sleep(0.5)
    print('killed', time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(np.ones(4))
"""


class Kernel:
    """Jupyter kernel with hvdlab."""

    def __init__(self, folder: str) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=folder)
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def run(self, code: str) -> tuple[float, str]:
        """Run a cell. Returns the seconds until it had ended and all text it wrote."""
        texts: list[str] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])
            elif message["msg_type"] == "error":
                texts.extend(message["content"]["traceback"])

        begin = time.perf_counter()
        self._client.execute_interactive(code, timeout=600, output_hook=keep)
        return time.perf_counter() - begin, "".join(texts)

    def memory(self) -> float:
        """Return bytes that the kernel and all its processes take, shared ones divided among those that share them."""
        kernel = next(
            child for child in psutil.Process().children() if "ipykernel" in " ".join(child.cmdline())
        )
        memory = 0.0
        for process in (kernel, *kernel.children(recursive=True)):
            memory += process.memory_full_info().pss
        return memory

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel()


@contextmanager
def started() -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        try:
            yield kernel
        finally:
            kernel.close()


def number(text: str, word: str) -> float:
    """Return the number behind a word that a rank has printed."""
    found = re.search(rf"{word} ([0-9.e+-]+)", text)
    if found is None:
        raise SystemExit(f"a cell did not print {word!r}:\n{text}")
    return float(found[1])


def measure(ranks: int, rounds: int) -> dict[str, float]:
    """Return the figures of one pool."""
    with started() as kernel:
        kernel.run("%load_ext hvdlab")
        start, _ = kernel.run(f"%%hvd_run -np {ranks}\npass")
        kernel.run(SETUP)
        found = {"start, s": start}
        found["empty cell, s"] = statistics.median(
            kernel.run("%%hvd_run\npass")[0] for _ in range(3 * rounds)
        )
        for name, elements, times in (("4 B", 1, 50), ("4 MiB", 1 << 20, 5)):
            code = REDUCE.format(elements=elements, times=times)
            found[f"allreduce {name}, s"] = statistics.median(
                number(kernel.run(code)[1], "took") for _ in range(rounds)
            )
        deaths, repairs = [], []
        for _ in range(rounds + 1):
            _, text = kernel.run(DEATH)
            deaths.append(time.time() - number(text, "killed"))
            repairs.append(kernel.run("%hvd_pool repair")[0])
            kernel.run(SETUP)
        found |= {"first death, s": deaths[0], "death, s": statistics.median(deaths[1:])}
        found |= {"repair, s": statistics.median(repairs), "memory, MiB": kernel.memory() / 2**20}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, action="append", help="4, 16 and 64 if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "ranks": {}}
    for ranks in options.ranks or (4, 16, 64):
        found = {name: float(f"{value:.4g}") for name, value in measure(ranks, options.rounds).items()}
        result["ranks"][str(ranks)] = found
        print(f"{ranks} ranks:", ", ".join(f"{name} {value:g}" for name, value in found.items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

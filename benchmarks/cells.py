"""Costs of a cell on ranks in a notebook, beside ipyparallel's ``%%px``.

    python benchmarks/cells.py                      # both figures, about two minutes
    python benchmarks/cells.py --json cells.json --rounds 20 --only empty

One real Jupyter kernel has both pools; the contenders take turns, so that a noisy neighbour hits both. A figure is the
median time from sending a cell to the kernel's last message about it, as a frontend sees it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

OURS, THEIRS = "%%hvd_run", "%%px"
LINES = 20_000  # lines that each rank prints
PRINTING = {
    "alike": f"for i in range({LINES}): print('line', i)",
    "different": f"for i in range({LINES}): print('rank', os.getpid(), 'line', i)",
}


@dataclass
class Sent:
    """Messages of the kernel about one cell."""

    seconds: float
    lines: int
    messages: int


class Kernel:
    """Jupyter kernel and its client."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._directory = tempfile.TemporaryDirectory()
        self._manager.start_kernel(cwd=self._directory.name, stderr=open(os.devnull, "w"))  # noqa: SIM115
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def run(self, code: str) -> Sent:
        """Run a cell; ends the program if it fails."""
        begin = time.perf_counter()
        wanted = self._client.execute(code)
        lines = messages = 0
        said = ""
        while True:
            message = self._client.get_iopub_msg(timeout=300)
            if message["parent_header"].get("msg_id") != wanted:
                continue
            kind, content = message["msg_type"], message["content"]
            messages += 1
            if kind == "stream":
                lines += content["text"].count("\n")
                said = content["text"][-2000:]
            elif kind in ("display_data", "update_display_data"):
                lines += content["data"].get("text/plain", "").count("\n")
            elif kind == "error":
                said = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                break
        seconds = time.perf_counter() - begin
        if self._client.get_shell_msg(timeout=60)["content"]["status"] != "ok":
            sys.exit(f"{code}\n{said}")
        return Sent(seconds, lines, messages)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._directory.cleanup()


def start(ranks: int) -> Kernel:
    """Return a kernel with a pool of each kind."""
    kernel = Kernel()
    kernel.run(
        f"import ipyparallel; cluster = ipyparallel.Cluster(n={ranks}); view = cluster.start_and_connect_sync()[:]"
    )
    kernel.run("%load_ext hvdlab")
    kernel.run(f"%%hvd_run -np {ranks}\nimport os")
    kernel.run("%%px\nimport os")
    return kernel


def stop(kernel: Kernel) -> None:
    kernel.run("%hvd_pool stop\ncluster.stop_cluster_sync()")
    kernel.close()


def compare(kernel: Kernel, body: str, rounds: int) -> dict[str, Any]:
    """Run a cell by turns on both pools."""
    times: dict[str, list[Sent]] = {OURS: [], THEIRS: []}
    for magic in times:
        kernel.run(f"{magic}\n{body}")
    for turn in range(rounds):
        for magic in (OURS, THEIRS) if turn % 2 else (THEIRS, OURS):
            times[magic].append(kernel.run(f"{magic}\n{body}"))
    ours, theirs = (statistics.median(s.seconds for s in times[magic]) for magic in (OURS, THEIRS))
    return {
        "hvd_run_ms": round(ours * 1000, 2),
        "px_ms": round(theirs * 1000, 2),
        "ratio": round(ours / theirs, 3),
        "rounds": rounds,
        "hvd_run_lines": times[OURS][-1].lines,
        "hvd_run_messages": times[OURS][-1].messages,
        "px_lines": times[THEIRS][-1].lines,
    }


def empty_cell(rounds: int) -> dict[str, Any]:
    kernel = start(8)
    try:
        return compare(kernel, "pass", rounds)
    finally:
        stop(kernel)


def many_lines(rounds: int) -> dict[str, Any]:
    kernel = start(4)
    try:
        return {name: compare(kernel, body, rounds) for name, body in PRINTING.items()}
    finally:
        stop(kernel)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="turns of the empty cell; a tenth of it for lines"
    )
    parser.add_argument("--only", choices=("empty", "lines"))
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    if options.only != "lines":
        found["empty cell, 8 ranks"] = empty_cell(options.rounds)
    if options.only != "empty":
        found["80000 lines, 4 ranks"] = many_lines(max(3, options.rounds // 10))
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

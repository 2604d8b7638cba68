"""What a pool costs as it grows: its start, a cell, a collective, the death of a rank, its repair, memory.

    python benchmarks/many_ranks.py                              # 4, 16 and 64 ranks on this machine, some two minutes
    python benchmarks/many_ranks.py --ranks 128 --json many.json
    python benchmarks/many_ranks.py --relays --ranks 64          # on hosts of 16 ranks, without relays and with them, by turns

A real Jupyter kernel has the pool; times are those from a cell's sending to the kernel's last message about it. The time of a
death is that from just before the rank sends itself SIGKILL, while all others wait for it, to the end of the cell with its report.
Medians of the rounds; the first death of a pool is given by itself, as ranks then import what they need to report.

With ``--relays`` the ranks are on hosts: loopback addresses of this machine (``tests/loopback_hosts.py``), each with an agent, which reach the
coordinator over TLS. Each round has a pool without relays and one with a relay on each host, in turns; the ratio is that of the
medians. What they compete for is one machine's cores: a cluster gives the coordinator cores of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import loopback_hosts

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
RELAYED = """\
%%hvd_run
from hvdlab.collectives import context
relayed = hvd.allreduce(np.array([float(not context.engine()._endpoint.secure)]), op=hvd.Sum)
if hvd.rank() == 0: print('relayed', relayed[0])
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

PER_HOST = 16
"""Ranks of a host at most, with ``--relays``; there are two hosts at least."""


class Kernel:
    """A Jupyter kernel with hvdlab.

    Args:
        folder: Its working directory.
        variables: What its environment has beside ours.
    """

    def __init__(self, folder: str, variables: Mapping[str, str]) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=folder, env={**os.environ, **variables})
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
        """Bytes that the kernel and all its processes take, shared ones divided among those that share them."""
        return float(sum(process.memory_full_info().pss for process in self._processes()))

    def coordinator_cpu(self) -> float:
        """Seconds for which the coordinator has used a processor."""
        coordinator = next(
            process for process in self._processes() if "hvdlab.collectives.coordinator" in process.cmdline()
        )
        tasks = Path(f"/proc/{coordinator.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def _processes(self) -> list[psutil.Process]:
        kernel = next(
            child for child in psutil.Process().children() if "ipykernel" in " ".join(child.cmdline())
        )
        return [kernel, *kernel.children(recursive=True)]

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel()


@contextmanager
def started(ranks: int, relays: bool | None) -> Iterator[tuple[Kernel, str]]:
    """A kernel, and the words that start a pool there. ``relays`` says whether hosts have them; ``None`` means ranks without hosts."""
    with tempfile.TemporaryDirectory() as folder:
        words, variables = f"-np {ranks}", {}
        if relays is not None:
            count = max(2, -(-ranks // PER_HOST))
            words += f" --launcher ssh --hosts {loopback_hosts.named(count, -(-ranks // count))}"
            options = loopback_hosts.options(Path(folder))
            words += "".join(f" --launcher-option {name}={value}" for name, value in options.items())
            variables["HVDLAB_RELAYS"] = str(int(relays))
        kernel = Kernel(folder, variables)
        try:
            yield kernel, words
        finally:
            kernel.close()


def number(text: str, word: str) -> float:
    """The number behind a word that a rank has printed."""
    found = re.search(rf"{word} ([0-9.e+-]+)", text)
    if found is None:
        raise SystemExit(f"a cell did not print {word!r}:\n{text}")
    return float(found[1])


def measure(ranks: int, rounds: int, relays: bool | None = None) -> dict[str, float]:
    """The figures of one pool; see :func:`started`."""
    with started(ranks, relays) as (kernel, words):
        kernel.run("%load_ext hvdlab")
        start, text = kernel.run(f"%%hvd_run {words}\npass")
        kernel.run(SETUP)
        if relays is not None and number(kernel.run(RELAYED)[1], "relayed") != ranks * relays:
            raise SystemExit(f"ranks are not behind relays, or are: {text}")
        found = {"start, s": start}
        begin = kernel.coordinator_cpu()
        found["empty cell, s"] = statistics.median(
            kernel.run("%%hvd_run\npass")[0] for _ in range(3 * rounds)
        )
        for_cell = (kernel.coordinator_cpu() - begin) / (3 * rounds)
        for name, elements, times in (("4 B", 1, 50), ("4 MiB", 1 << 20, 5)):
            code, begin = REDUCE.format(elements=elements, times=times), kernel.coordinator_cpu()
            found[f"allreduce {name}, s"] = statistics.median(
                number(kernel.run(code)[1], "took") for _ in range(rounds)
            )
            if relays is not None:
                cell = (kernel.coordinator_cpu() - begin) / rounds
                found[f"coordinator's CPU for that of {name}, s"] = (cell - for_cell) / (times + 1)
        deaths, repairs = [], []
        for _ in range(rounds + 1):
            _, text = kernel.run(DEATH)
            deaths.append(time.time() - number(text, "killed"))
            repairs.append(kernel.run("%hvd_pool repair")[0])
            kernel.run(SETUP)
        found |= {"first death, s": deaths[0], "death, s": statistics.median(deaths[1:])}
        found |= {"repair, s": statistics.median(repairs), "memory, MiB": kernel.memory() / 2**20}
        return found


def compare(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """The medians of pools without relays and with them, which have turns, and their ratio."""
    seen: dict[str, defaultdict[str, list[float]]] = {"without": defaultdict(list), "with": defaultdict(list)}
    for _ in range(rounds):
        for word, each in seen.items():
            for name, value in measure(ranks, 1, word == "with").items():
                each[name].append(value)
    medians = {
        word: {name: statistics.median(all) for name, all in each.items()} for word, each in seen.items()
    }
    return {
        **medians,
        "ratio": {name: value / medians["without"][name] for name, value in medians["with"].items()},
    }


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, action="append", help="4, 16 and 64 if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--relays", action="store_true", help="ranks are on hosts, without relays and with them by turns"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "ranks": {}}
    for ranks in options.ranks or (4, 16, 64):
        if options.relays:
            compared = {word: rounded(each) for word, each in compare(ranks, options.rounds).items()}
            result["ranks"][str(ranks)] = compared
            for word, each in compared.items():
                print(f"{ranks} ranks, {word}: {shown(each)}", flush=True)
            continue
        found = result["ranks"][str(ranks)] = rounded(measure(ranks, options.rounds))
        print(f"{ranks} ranks: {shown(found)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The same operations with hvdlab and with Horovod (Gloo), alternating in one run, if Horovod is installed.

    python benchmarks/versus_horovod.py --json benchmarks/results/versus_horovod.json   # about a minute

Without a real Horovod, hvdlab's figures are set against those that Horovod 0.28.1 had with Gloo and with MPI on an
idle machine with 2 cores: these ratios are marked "against recorded", and mean something on such a machine only.
Printed are medians in milliseconds and Horovod's time by hvdlab's: above 1 hvdlab is quicker.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allreduce import resnet50_shapes

OPTIMIZER = "ResNet-50 step by DistributedOptimizer"
GRADIENTS = "ResNet-50's 161 gradients by allreduce_async_"
SIZES = {"4 B allreduce": 4, "16 MiB allreduce": 16 << 20, "64 MiB allreduce": 64 << 20}
RECORDED = {
    # milliseconds at 2 ranks: (Gloo, MPI)
    "4 B allreduce": (1.1, 1.1),
    "16 MiB allreduce": (18.5, 5.3),
    "64 MiB allreduce": (61.0, 34.0),
    GRADIENTS: (151.0, 70.0),
}
TIMES = {4: 200, 16 << 20: 8, 64 << 20: 3}
Samples = dict[str, list[float]]


def operations(hvd: Any) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the measured operations, and how often in one turn, with either library."""
    import torch

    found: dict[str, tuple[Callable[[], object], int]] = {}
    for label, nbytes in SIZES.items():
        x = torch.ones(nbytes // 4)
        found[label] = (lambda x=x, label=label: hvd.allreduce_(x, name=label, op=hvd.Max)), TIMES[nbytes]
    gradients = [torch.ones(shape) for shape in resnet50_shapes()]

    def asynchronous() -> None:
        handles = [hvd.allreduce_async_(g, name=f"gradient.{i}", op=hvd.Max) for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)

    found[GRADIENTS] = asynchronous, 3
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in resnet50_shapes()]
    named = [(f"parameter.{i}", p) for i, p in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01), named_parameters=named)

    def step() -> None:
        optimizer.zero_grad()
        # A gradient of ones for each, in the order in which a backward pass reaches them.
        sum((p.sum() for p in reversed(parameters)), start=torch.zeros(())).backward()
        optimizer.step()

    found[OPTIMIZER] = step, 3
    return found


def rank_main(library: str) -> None:
    """Measure as a rank the cases that standard input names; rank 0 answers with milliseconds."""
    import torch

    torch.set_num_threads(1)
    if library == "horovod":
        import horovod.torch as hvd
    else:
        import hvdlab.torch as hvd  # type: ignore[no-redef]
    hvd.init()
    made = operations(hvd)
    for call, _ in made.values():
        call()
        call()
    if hvd.rank() == 0:
        print("ready", flush=True)
    for line in sys.stdin:
        call, times = made[line.strip()]
        hvd.allreduce_(torch.ones(1), name="together")
        found = []
        for _ in range(times):
            begin = time.perf_counter_ns()
            call()
            found.append((time.perf_counter_ns() - begin) / 1e6)
        if hvd.rank() == 0:
            print(json.dumps(found), flush=True)
    hvd.shutdown()


class World:
    """Ranks of one library; they wait idle while the others' are measured."""

    def __init__(self, library: str, ranks: int) -> None:
        self._coordinator: Any = None
        self.processes = []
        given = self._for_horovod(ranks) if library == "horovod" else self._for_hvdlab(ranks)
        for rank in range(ranks):
            env = {**os.environ, "OMP_NUM_THREADS": "1", **given, **places(library, rank, ranks)}
            command, pipe = [sys.executable, __file__, "--rank-of", library], subprocess.PIPE
            self.processes.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True))
        self._answer()

    def _for_hvdlab(self, ranks: int) -> dict[str, str]:
        from hvdlab.collectives.coordinator.process import CoordinatorProcess

        self._coordinator = CoordinatorProcess.start(size=ranks)
        return {"HVDLAB_COORDINATOR": self._coordinator.address, "HVDLAB_TOKEN": self._coordinator.token}

    def _for_horovod(self, ranks: int) -> dict[str, str]:
        """Return Horovod's own rendezvous server for Gloo, as ``horovodrun`` starts it."""
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        self._rendezvous = RendezvousServer()
        port = self._rendezvous.start()
        self._rendezvous.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_HOSTNAME": "localhost",
        }

    def _answer(self) -> str:
        first = self.processes[0].stdout
        assert first is not None
        line = first.readline()
        if not line:
            raise SystemExit("rank 0 ended")
        return line

    def measure(self, operation: str) -> list[float]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(operation + "\n")
            process.stdin.flush()
        found: list[float] = json.loads(self._answer())
        return found

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(20)
        if self._coordinator is not None:
            self._coordinator.close()


def places(library: str, rank: int, ranks: int) -> dict[str, str]:
    if library == "hvdlab":
        return {"HVDLAB_RANK": str(rank)}
    of = {
        "RANK": rank,
        "SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": ranks,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
    }
    return {f"HOROVOD_{name}": str(value) for name, value in of.items()}


def real_horovod() -> str | None:
    """Return the version of an installed Horovod that can be imported, hvdlab's stand-in not counted."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    found = subprocess.run(
        [sys.executable, "-c", "import horovod.torch as h; print(h.__file__)"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    return version if found.returncode == 0 and "hvdlab" not in found.stdout else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", choices=("hvdlab", "horovod"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        rank_main(given.rank_of)
        return
    version = real_horovod()
    libraries = ["hvdlab"] if version is None else ["hvdlab", "horovod"]
    worlds = {library: World(library, given.ranks) for library in libraries}
    samples: dict[str, Samples] = {library: {} for library in libraries}
    try:
        for _ in range(given.rounds):
            for operation in (*SIZES, GRADIENTS, OPTIMIZER):
                for library in libraries:
                    samples[library].setdefault(operation, []).extend(worlds[library].measure(operation))
            libraries.reverse()
    finally:
        for world in worlds.values():
            world.close()
    report = {
        "cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
        "ranks": given.ranks, "horovod": version or "not installed; its figures are recorded ones",
        "operations": {o: rows(samples, o, given.ranks) for o in (*SIZES, GRADIENTS, OPTIMIZER)},
    }  # fmt: skip
    show(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def rows(samples: dict[str, Samples], operation: str, ranks: int) -> dict[str, Any]:
    """Return medians and ratios of one operation."""
    ours = statistics.median(samples["hvdlab"][operation])
    found: dict[str, Any] = {"hvdlab_ms": round(ours, 4)}
    if "horovod" in samples:
        theirs = statistics.median(samples["horovod"][operation])
        found |= {"horovod_ms": round(theirs, 4), "ratio": round(theirs / ours, 2)}
    if operation in RECORDED and ranks == 2:
        gloo, mpi = RECORDED[operation]
        found["recorded"] = {"gloo_ms": gloo, "mpi_ms": mpi}
        found["ratio_against_recorded"] = {"gloo": round(gloo / ours, 2), "mpi": round(mpi / ours, 2)}
    return found


def show(report: dict[str, Any]) -> None:
    print(f"{report['ranks']} ranks, {report['cores']} cores; Horovod: {report['horovod']}")
    for operation, row in report["operations"].items():
        print(f"{operation}\n    hvdlab   {row['hvdlab_ms']:9.3f} ms")
        if "horovod_ms" in row:
            print(f"    horovod  {row['horovod_ms']:9.3f} ms  {row['ratio']:.2f}x hvdlab's time")
        if "recorded" in row:
            for name in ("gloo", "mpi"):
                ms, ratio = row["recorded"][f"{name}_ms"], row["ratio_against_recorded"][name]
                print(f"    horovod ({name})  {ms:9.3f} ms  {ratio:.2f}x hvdlab's time, against recorded")


if __name__ == "__main__":
    main()

"""Allreduce beside torch.distributed's Gloo, MPI and memcpy, alternating in one run.

    python benchmarks/allreduce.py --ranks 2 --ranks 4 --out benchmarks/results/allreduce.json
    python benchmarks/allreduce.py --ranks 2 --ranks 4 --busy --out benchmarks/results/allreduce_busy.json

hvdlab's figures include the negotiation (Gloo and MPI have none) and, unless ``--no-record``, the recording of spans. Ranks of MPI
spin while they wait; those of Intel MPI are in an environment of their own, which ``make intel-mpi`` makes.
Every round measures each system in turn, so that the machine's other load hits all of them. Printed are medians
over all rounds in microseconds, and hvdlab's ratio to each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SMALL = {"4 B": 4, "256 B": 256, "4 KiB": 4096}
LARGE = {"1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
RESNET = "ResNet-50 gradients"
Samples = dict[str, list[float]]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return shapes of ResNet-50's 161 parameters, 25,557,032 elements, in the order in which torchvision defines
    them."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def iterations(nbytes: int) -> int:
    """Return how often a size is measured per round."""
    return 200 if nbytes <= 4096 else max(3, min(40, (64 << 20) // nbytes))


def sample(call: Callable[[], object], times: int) -> list[float]:
    """Return microseconds of each call, after a few that are not counted."""
    for _ in range(max(2, times // 10)):
        call()
    found = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - begin) / 1000)
    return found


def sizes(small_only: bool) -> dict[str, int]:
    return SMALL if small_only else {**SMALL, **LARGE}


GLOO_BUCKET_BYTES = 25 << 20
"""What DistributedDataParallel puts together."""

# -- systems ------------------------------------------------------------------------------------------------------


def measure_hvdlab(small_only: bool) -> Samples:
    import hvdlab.numpy as hvd

    found = {}
    for label, nbytes in sizes(small_only).items():
        x = np.ones(nbytes // 4, np.float32)
        found[label] = sample(
            lambda x=x, label=label: hvd.allreduce_(x, label, op=hvd.Max), iterations(nbytes)
        )
    if not small_only:
        gradients = [np.ones(shape, np.float32) for shape in resnet50_shapes()]

        def step() -> None:
            for operation in [hvd.allreduce_async_(g, f"g{i}", op=hvd.Max) for i, g in enumerate(gradients)]:
                hvd.synchronize(operation)

        found[RESNET] = sample(step, 5)
    hvd.barrier()
    return found


def measure_gloo(small_only: bool) -> Samples:
    import torch
    import torch.distributed as dist

    found = {}
    for label, nbytes in sizes(small_only).items():
        x = torch.ones(nbytes // 4)
        found[label] = sample(lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX), iterations(nbytes))
    if not small_only:
        gradients = [torch.ones(shape) for shape in resnet50_shapes()]

        buckets = in_buckets([gradient.numel() for gradient in gradients], GLOO_BUCKET_BYTES // 4)
        flats = [torch.empty(sum(gradients[i].numel() for i in bucket)) for bucket in buckets]

        def step() -> None:
            works = []
            for bucket, flat in zip(buckets, flats, strict=True):
                torch.cat([gradients[i].view(-1) for i in bucket], out=flat)
                works.append(dist.all_reduce(flat, dist.ReduceOp.MAX, async_op=True))
            for bucket, flat, work in zip(buckets, flats, works, strict=True):
                work.wait()
                pieces = flat.split([gradients[i].numel() for i in bucket])
                for i, piece in zip(bucket, pieces, strict=True):
                    gradients[i].view(-1).copy_(piece)

        found[RESNET] = sample(step, 3)
    dist.barrier()
    return found


def in_buckets(counts: list[int], limit: int) -> list[list[int]]:
    """Return indices of consecutive tensors, as many together as stay within ``limit`` elements."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for index, count in enumerate(counts):
        if buckets[-1] and filled + count > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += count
    return buckets


def measure_mpi(small_only: bool) -> Samples:
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, {}
    for label, nbytes in sizes(small_only).items():
        x = np.ones(nbytes // 4, np.float32)
        y = np.empty_like(x)
        found[label] = sample(lambda x=x, y=y: world.Allreduce(x, y, MPI.MAX), iterations(nbytes))
    if not small_only:
        pairs = [(np.ones(shape, np.float32), np.empty(shape, np.float32)) for shape in resnet50_shapes()]

        def step() -> None:
            for x, y in pairs:
                world.Allreduce(x, y, MPI.MAX)

        found[RESNET] = sample(step, 5)
    return found


def measure_memcpy(small_only: bool) -> Samples:
    found = {}
    total = sum(math.prod(shape) for shape in resnet50_shapes()) * 4
    for label, nbytes in {**sizes(small_only), **({} if small_only else {RESNET: total})}.items():
        x = np.ones(nbytes // 4, np.float32)
        y = np.empty_like(x)
        found[label] = sample(lambda x=x, y=y: np.copyto(y, x), iterations(nbytes))
    return found


# -- processes ----------------------------------------------------------------------------------------------------


def rank_main(port: int, small_only: bool) -> None:
    """Measure as a rank the cases that standard input names; rank 0 answers with the samples."""
    import torch
    import torch.distributed as dist

    from hvdlab.collectives import context

    engine = context.init()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=engine.rank, world_size=engine.size
    )
    systems = {"hvdlab": measure_hvdlab, "gloo": measure_gloo, "memcpy": measure_memcpy}
    for line in sys.stdin:
        found = systems[line.strip()](small_only)
        if engine.rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    context.shutdown()


def mpi_main(small_only: bool) -> None:
    from mpi4py import MPI

    found = measure_mpi(small_only)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found), flush=True)


INTEL_MPI = Path("out/intel-mpi/bin")
"""The programs of the environment with Intel MPI."""


class MpiPrograms(NamedTuple):
    """One MPI: its ``mpiexec``, and the Python of an environment that has mpi4py for it."""

    launcher: str
    python: str


def installed_mpi() -> dict[str, MpiPrograms]:
    """Return MPICH, Open MPI and Intel MPI, as far as they are installed, by name."""
    found: dict[str, MpiPrograms] = {}
    beside = Path(sys.executable).parent
    for candidate in (str(beside / "mpiexec"), shutil.which("mpiexec"), shutil.which("mpiexec.openmpi")):
        if candidate and os.access(candidate, os.X_OK):
            version = subprocess.run(
                [candidate, "--version"], check=False, capture_output=True, text=True
            ).stdout
            name = "openmpi" if "Open MPI" in version or "OpenRTE" in version else "mpich"
            found.setdefault(name, MpiPrograms(candidate, sys.executable))
    if (INTEL_MPI / "mpiexec").exists():
        found["intel"] = MpiPrograms(str(INTEL_MPI / "mpiexec"), str(INTEL_MPI / "python"))
    return found


class World:
    """Rank processes of one run."""

    def __init__(self, ranks: int, small_only: bool, record: bool) -> None:
        from hvdlab.collectives.coordinator.process import CoordinatorProcess

        self.ranks, self.small_only = ranks, small_only
        self.coordinator = CoordinatorProcess.start(size=ranks)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for rank in range(ranks):
            env = {
                **os.environ,
                "HVDLAB_COORDINATOR": self.coordinator.address,
                "HVDLAB_TOKEN": self.coordinator.token,
                "HVDLAB_RANK": str(rank),
                "HVDLAB_RECORD": str(int(record)),
                "OMP_NUM_THREADS": "1",
            }
            arguments = ["--rank-port", str(port), *(["--small"] if small_only else [])]
            command = [sys.executable, __file__, *arguments]
            pipe = subprocess.PIPE
            self.processes.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True))

    def measure(self, system: str) -> Samples:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(system + "\n")
            process.stdin.flush()
        first = self.processes[0].stdout
        assert first is not None
        line = first.readline()
        if not line:
            raise SystemExit(f"rank 0 ended while measuring {system}")
        samples: Samples = json.loads(line)
        return samples

    def measure_mpi(self, mpi: MpiPrograms) -> Samples:
        arguments = ["--mpi", *(["--small"] if self.small_only else [])]
        command = [mpi.launcher, "-n", str(self.ranks), mpi.python, __file__, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr)
        samples: Samples = json.loads(done.stdout.strip().splitlines()[-1])
        return samples

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
        self.coordinator.close()


@contextmanager
def busy_cores() -> Iterator[None]:
    """Run a program that is always busy on each core that this process may use."""
    loop = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", loop, str(core)]) for core in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rounds(world: World, count: int, mpi: dict[str, MpiPrograms]) -> Iterator[tuple[str, Samples]]:
    for _ in range(count):
        for system in ("hvdlab", "gloo", "memcpy"):
            yield system, world.measure(system)
        for name, programs in mpi.items():
            yield name, world.measure_mpi(programs)


def measure(
    ranks: int, count: int, *, small_only: bool, record: bool, mpi: dict[str, MpiPrograms]
) -> dict[str, Any]:
    """Return all systems' samples at one number of ranks, as medians in microseconds per case."""
    gathered: dict[str, Samples] = {}
    world = World(ranks, small_only, record)
    try:
        for system, samples in rounds(world, count, mpi):
            for label, values in samples.items():
                gathered.setdefault(label, {}).setdefault(system, []).extend(values)
    finally:
        world.close()
    return {
        label: {system: round(statistics.median(values), 1) for system, values in systems.items()}
        for label, systems in gathered.items()
    }


def show(ranks: int, cases: dict[str, dict[str, float]]) -> None:
    systems = list(next(iter(cases.values())))
    print(f"\n{ranks} ranks, median us".ljust(24) + "".join(name.rjust(12) for name in systems), end="")
    print("".join(f"/{name}".rjust(10) for name in systems[1:]))
    for label, found in cases.items():
        print(label.ljust(23) + "".join(f"{found[name]:12,.1f}" for name in systems), end="")
        print("".join(f"{found['hvdlab'] / found[name]:10.2f}" for name in systems[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, action="append", help="number of ranks; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small messages only")
    parser.add_argument("--no-record", action="store_true", help="record no spans")
    parser.add_argument("--no-mpi", action="store_true")
    parser.add_argument(
        "--busy", action="store_true", help="beside a program that is always busy on each core"
    )
    parser.add_argument("--out", type=Path, help="write the medians as JSON")
    parser.add_argument("--rank-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mpi", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_port is not None:
        return rank_main(options.rank_port, options.small)
    if options.mpi:
        return mpi_main(options.small)
    mpi = {} if options.no_mpi else installed_mpi()
    results: dict[str, Any] = {
        "recorded": not options.no_record,
        "cores": os.cpu_count(),
        "busy": options.busy,
        "ranks": {},
    }
    with busy_cores() if options.busy else nullcontext():
        for ranks in options.ranks or [2, 4]:
            cases = measure(
                ranks, options.rounds, small_only=options.small, record=not options.no_record, mpi=mpi
            )
            results["ranks"][str(ranks)] = cases
            show(ranks, cases)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()

"""Costs of a data plane by itself, beside others on the same buffers, without negotiation.

    python benchmarks/planes.py -n 2                      # shm, torch Gloo, one memcpy
    mpiexec -n 2 python benchmarks/planes.py              # the same with MPI
    python benchmarks/planes.py -n 4 --sizes 4,64M --op allgather --contenders shm
    mpiexec -n 4 python benchmarks/planes.py --hosts aabb --sizes 4K,1M,16M,64M --json benchmarks/results/hierarchical.json

``--hosts`` gives each rank a simulated host: the planes ``hierarchical`` (with Gloo between hosts), ``hierarchical-mpi`` and
``flat`` (Gloo between all ranks) run beside MPI's own allreduce. All bytes then move within one machine, "between hosts"
through its loopback device and as fast as its cores copy, so this measures the cost of the steps, not the gain on a
network.

The contenders take turns within one run, so that a noisy neighbour hits all of them. A figure is the median over the
rounds of the slowest rank's time, from a barrier on; in brackets, relative to the memcpy of the same bytes that all
ranks do at the same time. ``--sizes`` are bytes per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.base import KeyValue, PhaseTimes, PlaneContext
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.registry import plane_class
from hvdlab.collectives.planes.shm import ShmPlane
from hvdlab.collectives.planes.shm.layout import layout_from
from hvdlab.collectives.types import SUM, DType

Array = npt.NDArray[Any]
OPS = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Group:
    """This process's place, and the ranks' shared objects."""

    rank: int
    size: int
    memory_fd: int
    rendezvous: str
    world: Any  # mpi4py's COMM_WORLD, or None


@dataclass
class Buffers:
    source: Array
    target: Array
    gathered: Array


class FileStore(KeyValue):
    """Rendezvous through a file that torch keeps."""

    def __init__(self, path: str, scope: str) -> None:
        import torch.distributed as dist

        self._store = dist.FileStore(path)
        self._scope = scope

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._scope + key, value.decode("latin-1"))

    def get(self, key: str, timeout: float) -> bytes:
        self._store.wait([self._scope + key], timedelta(seconds=timeout))
        return bytes(self._store.get(self._scope + key)).decode().encode("latin-1")


def between_hosts(group: Group, name: str, hosts: str, options: dict[str, str]) -> HostPlane:
    """Return one of the planes for several hosts, connected."""
    plane, _, outer = name.partition("-")
    cls = plane_class("gloo" if plane == "flat" else plane)
    made = cls(PlaneContext(
        0, 1, group.rank, group.size, tuple(range(group.size)), tuple(hosts),
        store=FileStore(group.rendezvous + "-planes", f"{name}/"), options=options | {"outer": outer or "gloo"},
    ))  # fmt: skip
    made.connect(60)
    return made


def shm(group: Group, options: dict[str, str]) -> HostPlane:
    """Return the plane of one host, connected."""
    plane = ShmPlane(PlaneContext(
        0, 1, group.rank, group.size, tuple(range(group.size)), ("here",) * group.size,
        memory_fd=group.memory_fd, options=options,
    ))  # fmt: skip
    plane.connect(30)
    return plane


def ours(group: Group, plane: HostPlane) -> Callable[[str, Buffers], None]:
    """Return how to run one operation on a plane."""

    def run(op: str, b: Buffers) -> None:
        n, share = group.size, [len(b.source) // group.size] * group.size
        if op == "allreduce":
            plane.allreduce([b.source], [b.target], DType.F32, SUM, PhaseTimes())
        elif op == "inplace":
            plane.allreduce([b.target], [b.target], DType.F32, SUM, PhaseTimes())
        elif op == "allgather":
            plane.allgather(b.source, [len(b.source)] * n, b.gathered, PhaseTimes())
        elif op == "broadcast":
            plane.broadcast(b.target, 0, PhaseTimes())
        elif op == "reducescatter":
            plane.reducescatter(
                b.source[: sum(share)],
                share,
                b.target[: share[0]],
                DType.F32,
                SUM,
                PhaseTimes(),
            )
        else:
            plane.alltoall(b.source[: sum(share)], share, share, b.target[: sum(share)], PhaseTimes())

    return run


def mpi(group: Group) -> Callable[[str, Buffers], None]:
    from mpi4py import MPI

    world = group.world

    def run(op: str, b: Buffers) -> None:
        share = len(b.source) // group.size
        if op == "allreduce":
            world.Allreduce(b.source, b.target)
        elif op == "inplace":
            world.Allreduce(MPI.IN_PLACE, b.target)
        elif op == "allgather":
            world.Allgather(b.source, b.gathered)
        elif op == "broadcast":
            world.Bcast(b.target, 0)
        elif op == "reducescatter":
            world.Reduce_scatter_block(b.source[: share * group.size], b.target[:share])
        else:
            world.Alltoall(b.source[: share * group.size], b.target[: share * group.size])

    return run


def gloo(group: Group) -> Callable[[str, Buffers], None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(group.rendezvous, group.size)
    dist.init_process_group(
        "gloo", store=store, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=60)
    )

    def run(op: str, b: Buffers) -> None:
        source, target = torch.from_numpy(b.source), torch.from_numpy(b.target)
        if op == "allreduce":
            target.copy_(source)
            dist.all_reduce(target)
        elif op == "inplace":
            dist.all_reduce(target)
        elif op == "allgather":
            dist.all_gather_into_tensor(torch.from_numpy(b.gathered), source)
        elif op == "broadcast":
            dist.broadcast(target, 0)
        else:
            raise NotImplementedError(op)

    return run


def memcpy(op: str, b: Buffers) -> None:
    np.copyto(b.target, b.source)


def measure(
    plane: HostPlane, runners: dict[str, Callable[[], None]], rounds: int, size: int
) -> dict[str, float]:
    """Return medians in microseconds over the rounds of the slowest rank, by contender."""
    times: dict[str, list[int]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            plane.barrier(PhaseTimes())
            start = perf_counter_ns()
            run()
            times[name].append(perf_counter_ns() - start)
    medians = {}
    for name, mine in times.items():
        everybody = np.empty(rounds * size, np.int64)
        plane.allgather(np.array(mine, np.int64), [rounds] * size, everybody, PhaseTimes())
        slowest = everybody.reshape(size, rounds).max(0)
        medians[name] = statistics.median(slowest[rounds // 5 :].tolist()) / 1e3
    return medians


def contenders(
    group: Group, plane: HostPlane, arguments: argparse.Namespace, options: dict[str, str]
) -> tuple[dict[str, Callable[[str, Buffers], None]], list[HostPlane]]:
    """Return the measured functions, by name, and the planes to be closed in the end."""
    runners: dict[str, Callable[[str, Buffers], None]] = {"shm": ours(group, plane), "memcpy": memcpy}
    opened = [plane]
    if arguments.hosts:
        names = ["hierarchical", "flat"] + ["hierarchical-mpi"] * (group.world is not None)
        for name in names:
            opened.append(between_hosts(group, name, arguments.hosts, options))
            runners[name] = ours(group, opened[-1])
    if group.world is not None and "mpi" in arguments.contenders:
        runners["mpi"] = mpi(group)
    if "gloo" in arguments.contenders and arguments.op in ("allreduce", "inplace", "allgather", "broadcast"):
        runners["gloo"] = gloo(group)
    return runners, opened


def work(group: Group, arguments: argparse.Namespace) -> None:
    options = dict(pair.split("=", 1) for pair in arguments.option)
    plane = shm(group, options)
    runners, opened = contenders(group, plane, arguments, options)
    if group.rank == 0:
        print(f"{arguments.op} float32, {group.size} ranks {arguments.hosts} {options or ''}", flush=True)
    results: dict[str, dict[str, float]] = {}
    for nbytes in arguments.sizes:
        count = max(1, nbytes // 4)
        buffers = Buffers(
            np.ones(count, np.float32), np.ones(count, np.float32), np.ones(count * group.size, np.float32)
        )
        rounds = arguments.rounds or max(11, min(400, (256 << 20) // max(nbytes, 1)))
        calls = {name: partial(run, arguments.op, buffers) for name, run in runners.items()}
        medians = results[str(nbytes)] = measure(plane, calls, rounds, group.size)
        if group.rank == 0:
            print(f"{nbytes:>11}  " + "  ".join(
                f"{name} {us:9.1f} us ({us / medians['memcpy']:5.2f})" for name, us in medians.items()
            ), flush=True)  # fmt: skip
    if group.rank == 0 and arguments.json:
        report(results, group, arguments)
    for each in opened:
        each.close()


def report(results: dict[str, dict[str, float]], group: Group, arguments: argparse.Namespace) -> None:
    """Write the medians, in microseconds by bytes and contender."""
    told = {
        "operation": arguments.op,
        "ranks": group.size,
        "hosts": arguments.hosts,
        "simulated": bool(arguments.hosts),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "microseconds": {
            size: {n: round(us, 1) for n, us in medians.items()} for size, medians in results.items()
        },
    }
    Path(arguments.json).write_text(json.dumps(told, indent=2) + "\n")


def parse_size(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=2, help="ranks; under mpiexec its number counts")
    parser.add_argument("--op", default="allreduce", choices=(*OPS, "inplace"))
    parser.add_argument(
        "--sizes", default="4,4K,64K,1M,16M,64M", type=lambda s: [parse_size(p) for p in s.split(",")]
    )
    parser.add_argument("--contenders", default="shm,mpi,gloo", type=lambda s: s.split(","))
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="plane option, such as chunk_bytes=262144"
    )
    parser.add_argument(
        "--hosts", default="", help="a letter for each rank: those with the same one are on one host"
    )
    parser.add_argument("--json", default="", help="file for the medians")
    arguments = parser.parse_args(argv)
    options = dict(pair.split("=", 1) for pair in arguments.option)
    if {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        under_mpi(arguments, options)
    else:
        forked(arguments, options)


def memory(size: int, options: dict[str, str]) -> int:
    fd = os.memfd_create("planes")
    os.ftruncate(fd, layout_from(options, size).size)
    return fd


def under_mpi(arguments: argparse.Namespace, options: dict[str, str]) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    fd = memory(world.size, options) if world.rank == 0 else -1
    directory = tempfile.mkdtemp() if world.rank == 0 else ""
    where, directory = world.bcast((f"/proc/{os.getpid()}/fd/{fd}", directory))
    if world.rank:
        fd = os.open(where, os.O_RDWR)
    world.Barrier()
    work(Group(world.rank, world.size, fd, str(Path(directory) / "store"), world), arguments)


def forked(arguments: argparse.Namespace, options: dict[str, str]) -> None:
    fd = memory(arguments.n, options)
    with tempfile.TemporaryDirectory() as directory:
        pids = []
        for rank in range(arguments.n):
            pid = os.fork()
            if not pid:
                work(Group(rank, arguments.n, fd, str(Path(directory) / "store"), None), arguments)
                sys.stdout.flush()
                os._exit(0)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise SystemExit(f"exit codes {codes}")


if __name__ == "__main__":
    main()

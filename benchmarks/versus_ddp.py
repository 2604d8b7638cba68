"""A whole training step with hvdlab's DistributedOptimizer beside torch's DistributedDataParallel (Gloo), on CPU.

    python benchmarks/versus_ddp.py --json benchmarks/results/versus_ddp.json   # about two minutes

Both train the same residual network from the same start in the same processes, one thread per rank. They take turns in
blocks of steps, in changing order, so that the machine's other load hits both. Printed are medians over all
steps in milliseconds, the median over turns of DistributedDataParallel's time by hvdlab's (above 1 hvdlab is quicker),
and the processor time of rank 0 (with hvdlab's coordinator's) per step, which other load on the machine hardly changes.
"alone" is the step without any reduction.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

CASES = {
    # name: (channels of the first stage, images per rank, extent of an image, steps per turn)
    "ResNet-18, width 64, 4 images of 32x32": (64, 4, 32, 3),
    "ResNet-18, width 32, 8 images of 32x32": (32, 8, 32, 5),
    "ResNet-18, width 16, 4 images of 32x32": (16, 4, 32, 10),
    "ResNet-18, width 8, 2 images of 16x16": (8, 2, 16, 15),
}


def resnet18(width: int) -> Any:
    """Return a ResNet-18 for small images; ``width`` 64 gives its 11 million parameters."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, into: int, out: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(out)
            self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(out)
            self.skip: nn.Module = nn.Identity()
            if stride != 1 or into != out:
                self.skip = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.norm1(self.first(x)))
            return torch.relu(self.norm2(self.second(y)) + self.skip(x))

    stages: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    into = width
    for number in range(4):
        out = width << number
        stages += [Block(into, out, 1 if number == 0 else 2), Block(out, out, 1)]
        into = out
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))


Step = Callable[[], None]


def make_step(model: Any, optimizer: Any, images: Any, labels: Any) -> Step:
    import torch

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def steps_of(case: str, rank: int, options: dict[str, Any]) -> dict[str, Step]:
    """Return a training step of each system."""
    import torch

    import hvdlab.torch as hvd

    width, batch, extent, _ = CASES[case]
    torch.manual_seed(rank)
    images, labels = torch.randn(batch, 3, extent, extent), torch.randint(10, (batch,))

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(0)
    ours = resnet18(width)
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(ours), named_parameters=ours.named_parameters(), **options)
    torch.manual_seed(0)
    theirs = torch.nn.parallel.DistributedDataParallel(resnet18(width))
    alone = resnet18(width)
    return {
        "hvdlab": make_step(ours, optimizer, images, labels),
        "ddp": make_step(theirs, sgd(theirs), images, labels),
        "alone": make_step(alone, sgd(alone), images, labels),
    }


def rank_main(port: int) -> None:
    """Measure as a rank the cases that standard input names; rank 0 answers with the milliseconds of each step."""
    import torch
    import torch.distributed as dist

    import hvdlab.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size()
    )
    made: dict[str, dict[str, Step]] = {}
    for line in sys.stdin:
        case, system, count, options = json.loads(line)
        if case not in made:
            made.clear()
            made[case] = steps_of(case, hvd.rank(), options)
        step = made[case][system]
        dist.barrier()
        times = []
        cpu = time.process_time()
        for _ in range(count):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1000)
        if hvd.rank() == 0:
            print(json.dumps([times, (time.process_time() - cpu) * 1000]), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


class World:
    """Rank processes of one run."""

    def __init__(self, ranks: int) -> None:
        from hvdlab.collectives.coordinator.process import CoordinatorProcess

        self.coordinator = CoordinatorProcess.start(size=ranks)
        self._coordinator_process = psutil.Process(self.coordinator.pid)
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
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--rank-port", str(port)]
            pipe = subprocess.PIPE
            self.processes.append(subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True))

    def measure(
        self, case: str, system: str, count: int, options: dict[str, Any]
    ) -> tuple[list[float], float]:
        """Return milliseconds of each step, and of processor time of all."""
        before = self._coordinator_milliseconds()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([case, system, count, options]) + "\n")
            process.stdin.flush()
        first = self.processes[0].stdout
        assert first is not None
        line = first.readline()
        if not line:
            raise SystemExit(f"rank 0 ended while measuring {system}")
        times, cpu = json.loads(line)
        return times, cpu + self._coordinator_milliseconds() - before

    def _coordinator_milliseconds(self) -> float:
        found = self._coordinator_process.cpu_times()
        return 1000 * (found.user + found.system)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(20)
        self.coordinator.close()


SYSTEMS = ("hvdlab", "ddp", "alone")


def compare(world: World, case: str, seconds: float, options: dict[str, Any]) -> dict[str, Any]:
    """Take turns for some seconds; medians and ratios of one case."""
    count = CASES[case][3]
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    cpu = dict.fromkeys(SYSTEMS, 0.0)
    turns: dict[str, list[float]] = {"ddp": [], "alone": []}
    for system in SYSTEMS:
        world.measure(case, system, 3, options)  # the first steps build planes, buckets and caches
    end = time.monotonic() + seconds
    order = list(SYSTEMS)
    while time.monotonic() < end or len(turns["ddp"]) < 3:
        found = {system: world.measure(case, system, count, options) for system in order}
        for system, (steps, spent) in found.items():
            times[system] += steps
            cpu[system] += spent
        ours = statistics.median(found["hvdlab"][0])
        for other, ratios in turns.items():
            ratios.append(statistics.median(found[other][0]) / ours)
        order = order[1:] + order[:1]
    return {
        "milliseconds": {system: round(statistics.median(t), 3) for system, t in times.items()},
        "cpu_milliseconds": {system: round(cpu[system] / len(t), 3) for system, t in times.items()},
        "steps": len(times["hvdlab"]),
        "turns": len(turns["ddp"]),
        "ratios": {other: round(statistics.median(r), 3) for other, r in turns.items()},
        "range": {other: [round(min(r), 3), round(max(r), 3)] for other, r in turns.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=25, help="for each case")
    parser.add_argument("--case", type=int, action="append", help="number of a case; all by default")
    parser.add_argument("--groups", type=int, help="num_groups= of DistributedOptimizer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_port is not None:
        rank_main(given.rank_port)
        return
    options = {} if given.groups is None else {"num_groups": given.groups}
    names = list(CASES)
    world = World(given.ranks)
    found = {}
    try:
        for number in given.case or range(len(names)):
            case = names[number]
            found[case] = result = compare(world, case, given.seconds, options)
            print(f"{case} ({given.ranks} ranks, {result['turns']} turns)")
            for system, ms in result["milliseconds"].items():
                ratio = (
                    f"  {result['ratios'][system]:.2f}x hvdlab's time" if system in result["ratios"] else ""
                )
                print(
                    f"    {system:8} {ms:9.2f} ms, {result['cpu_milliseconds'][system]:9.2f} ms of CPU{ratio}"
                )
    finally:
        world.close()
    if given.json:
        import torch

        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        report = {**machine, **versions, "ranks": given.ranks, "cases": found}
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

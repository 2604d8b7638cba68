"""Collectives of ``torch.distributed`` and steps of wrapped models on hvdlab beside torch's own backends: Gloo on CPU, NCCL on GPUs.

    hvdlab run -np 2 python benchmarks/c10d.py --json c10d-2.json          # two minutes
    hvdlab run -np 2 python benchmarks/c10d.py --only all_reduce           # rows with this in their name
    hvdlab run -np 2 python benchmarks/c10d.py --watched gloo              # a watched group beside the backend that it has inside
    hvdlab run -np 2 python benchmarks/c10d.py --watched nccl              # the same on GPUs, or on one that the ranks share

The same ranks have a group of each backend, and these take turns in blocks of calls, so that the machine's other load
hits both. Printed, by rank 0, are minimum, lower quartile and median over all calls in microseconds, and the median over
blocks of hvdlab's time by the other's (below 1 hvdlab is quicker). On GPUs a call ends when its GPU is done. Of the rows *above local* the time of the same step without a group
is taken off both. The last line is the time that the entry point, by which torch finds the backend, adds to ``import
torch``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from allreduce import resnet50_shapes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hvdlab.torch.c10d import WatchOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.real_gpu import choose_gpu

KIB, MIB = 1 << 10, 1 << 20
DEVICE = torch.device("cpu")
"""Where the tensors and the models of this rank are."""
LOCAL = "local"
"""The name under which a step without a group is measured."""
Call = Callable[[Any], object]
WARM_UP = 3
"""Steps of a new model that are not counted: DDP forms its buckets anew after the first."""
ENTRY_POINT = """
import importlib.metadata as metadata, os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
(entry,) = [one for one in metadata.entry_points(group="torch.backends") if one.name == "hvdlab"]
begin = time.perf_counter_ns()
entry.load()()
print((time.perf_counter_ns() - begin) / 1000)
"""


# -- collectives ------------------------------------------------------------------------------------------------------


def _all_reduce(nbytes: int) -> Call:
    tensor = torch.ones(nbytes // 4, device=DEVICE)
    return lambda group: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def _all_gather(nbytes: int) -> Call:
    output = torch.ones(nbytes // 4, device=DEVICE)
    given = torch.ones(output.numel() // dist.get_world_size(), device=DEVICE)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    output = output[: given.numel() * dist.get_world_size()]
    return lambda group: gather(output, given, group=group)


def _reduce_scatter(nbytes: int) -> Call:
    output = torch.ones(nbytes // 4 // dist.get_world_size(), device=DEVICE)
    given = torch.ones(output.numel() * dist.get_world_size(), device=DEVICE)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda group: scatter(output, given, op=dist.ReduceOp.MAX, group=group)


# -- steps ------------------------------------------------------------------------------------------------------------


class Tensors(nn.Module):
    """Model of some parameters, whose forward and backward passes cost next to nothing.

    Args:
        shapes: Of the parameters.
    """

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * sum(each.sum() for each in self.tensors)


class Transformer(nn.Module):
    """100 million parameters: twelve layers of 768 numbers, and 20,000 words."""

    WORDS, WIDTH, LENGTH = 20_000, 768, 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.WORDS, self.WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(self.WIDTH, 12, 4 * self.WIDTH, dropout=0.0, batch_first=True)
            for _ in range(12)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def _step(make: Callable[[Any], nn.Module], given: torch.Tensor) -> Call:
    """A forward and a backward pass. Each group has a model of its own, which ``make`` wraps for it; ``None`` stands for no group."""
    models: dict[Any, nn.Module] = {}

    def step(group: Any) -> None:
        model = models.get(group)
        if model is None:
            model = models[group] = make(group)
            for _ in range(WARM_UP):
                step(group)
        model.zero_grad(set_to_none=True)
        model(given).backward()

    return step


def _replicated(model: nn.Module, group: Any, bucket_mib: float) -> nn.Module:
    model = model.to(DEVICE)
    if group is None:
        return model
    return nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mib)


def _resnet50(_: int) -> Call:
    return _step(
        lambda group: _replicated(Tensors(resnet50_shapes()), group, 25.0), torch.ones((), device=DEVICE)
    )


def _small_buckets(count: int) -> Call:
    shapes: list[tuple[int, ...]] = [(KIB,)] * count
    return _step(
        lambda group: _replicated(Tensors(shapes), group, 4 * KIB / MIB), torch.ones((), device=DEVICE)
    )


def _small_step(width: int) -> Call:
    """A whole step of training: also the optimizer's."""

    def make(group: Any) -> nn.Module:
        layers = [nn.Linear(width, width) for _ in range(8)]
        return _replicated(nn.Sequential(*layers), group, 25.0)

    models: dict[Any, tuple[nn.Module, torch.optim.Optimizer]] = {}
    given = torch.ones(32, width, device=DEVICE)

    def step(group: Any) -> None:
        if group not in models:
            model = make(group)
            models[group] = model, torch.optim.SGD(model.parameters(), 1e-3)
            for _ in range(WARM_UP):
                step(group)
        model, optimizer = models[group]
        optimizer.zero_grad(set_to_none=True)
        model(given).square().mean().backward()
        optimizer.step()

    return step


def _sharded(_: int) -> Call:
    def make(group: Any) -> nn.Module:
        torch.manual_seed(0)
        model, mesh = Transformer().to(DEVICE), DeviceMesh.from_group(group, DEVICE.type)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return _step(make, torch.arange(Transformer.LENGTH, device=DEVICE).reshape(1, -1))


# -- measuring --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One measured operation.

    Attributes:
        make: Makes the call, from ``number``.
        number: Bytes of a collective; how many buckets a model has.
        calls: How many in a block.
        above_local: Whether the time of the same without a group is taken off.
    """

    make: Callable[[int], Call]
    number: int
    calls: int
    above_local: bool = False


CASES = {
    "all_reduce 4 B": Case(_all_reduce, 4, 100),
    "all_reduce 4 KiB": Case(_all_reduce, 4 * KIB, 100),
    "all_reduce 1 MiB": Case(_all_reduce, MIB, 20),
    "all_reduce 16 MiB": Case(_all_reduce, 16 * MIB, 4),
    "all_reduce 64 MiB": Case(_all_reduce, 64 * MIB, 2),
    "all_gather_into_tensor 16 MiB": Case(_all_gather, 16 * MIB, 4),
    "reduce_scatter_tensor 16 MiB": Case(_reduce_scatter, 16 * MIB, 4),
    "DDP step, ResNet-50's parameters": Case(_resnet50, 0, 2),
    "DDP step, 32 buckets of 4 KiB, above local": Case(_small_buckets, 32, 20, above_local=True),
    "small training step, DDP of 8 layers of 256": Case(_small_step, 256, 100),
    "fully_shard step, transformer of 100 M": Case(_sharded, 0, 1),
}


def _until_done(call: Call) -> Call:
    """Return the call, which ends once the GPU has done it if the tensors are there."""
    if DEVICE.type == "cpu":
        return call

    def until_done(group: Any) -> None:
        call(group)
        torch.cuda.synchronize()

    return until_done


def measure(case: Case, groups: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Return microseconds of each call, in blocks that take turns, and the printed figures. The first group is hvdlab's."""
    ours, theirs = groups
    call = _until_done(case.make(case.number))
    if case.above_local:
        groups = {**groups, LOCAL: None}
    times: dict[str, list[list[float]]] = {name: [] for name in groups}
    for group in groups.values():
        call(group)
    for block in range(blocks):
        for name in sorted(groups, reverse=bool(block % 2)):
            group, found = groups[name], []
            dist.barrier(group=group)
            for _ in range(case.calls):
                began = time.perf_counter_ns()
                call(group)
                found.append((time.perf_counter_ns() - began) / 1000)
            times[name].append(found)
    row: dict[str, Any] = {}
    for name, found in times.items():
        every = sorted(value for block in found for value in block)
        row[name] = [every[0], every[len(every) // 4], statistics.median(every)]
    alone = row[LOCAL][-1] if case.above_local else 0.0
    ratios = [
        (statistics.median(one) - alone) / (statistics.median(other) - alone)
        for one, other in zip(times[ours], times[theirs], strict=True)
    ]
    return {**row, "ratio": statistics.median(ratios)}


def entry_point_us(times: int = 5) -> float:
    """Return the time that the entry point adds to ``import torch``, in microseconds; the median of new processes."""
    found = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", ENTRY_POINT], capture_output=True, text=True, check=True)
        found.append(float(done.stdout))
    return statistics.median(found)


def begin(watched: str) -> dict[str, Any]:
    """Make the groups that are compared, hvdlab's first: an agreed one and Gloo's, or a watched one and its inner backend's."""
    global DEVICE
    if watched == "nccl":
        DEVICE = choose_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    options = WatchOptions("watched", watched) if watched else WatchOptions("agreed")
    dist.init_process_group("hvdlab", pg_options=options)
    other = watched or "gloo"
    return {
        "watched" if watched else "hvdlab": dist.group.WORLD,
        other: dist.new_group(backend=other),
    }


def keep(found: dict[str, Any], file: Path | None) -> None:
    """Write the figures to a file, if they are to be in one."""
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=10, help="blocks of each backend (default: %(default)s)"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="rows with this in their name")
    parser.add_argument(
        "--watched",
        choices=("gloo", "nccl"),
        default="",
        help="a watched group, beside this backend by itself",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    groups = begin(options.watched)
    rows: dict[str, Any] = {}
    found = {"ranks": dist.get_world_size(), "torch": torch.__version__, "microseconds": rows}
    for name, case in CASES.items():
        if options.only not in name:
            continue
        row = rows[name] = measure(case, groups, options.blocks)
        if dist.get_rank() == 0:
            shown = "  ".join(
                f"{each} " + " / ".join(f"{t:.0f}" for t in row[each]) for each in row if each != "ratio"
            )
            print(f"{name:30} {shown}  ratio {row['ratio']:.2f}", flush=True)
            keep(found, options.json)  # one that is ended before the last row has those until then
    if dist.get_rank() == 0:
        if not options.only and not options.watched:
            found["entry_point_us"] = entry_point_us()
            print(f"the entry point adds {found['entry_point_us']:.0f} microseconds to import torch")
        keep(found, options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

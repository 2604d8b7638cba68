"""Costs of collectives of ranks that share one GPU, beside staging through the host and beside one copy on the GPU.

    python benchmarks/on_gpus.py                                   # 2, 4 and 8 ranks, 4 KiB to 256 MiB
    python benchmarks/on_gpus.py --ranks 4 --sizes 1M,64M --json benchmarks/results/on_gpus.json
    python benchmarks/on_gpus.py --plane nccl --ranks 2            # hvdlab's plane over NCCL
    python benchmarks/on_gpus.py --device cpu --sizes 4K --sizes-only    # to see that it runs, where there is no GPU

The contenders take turns within one run: ``plane`` (`cuda/ipc`, in place), ``staged`` (the same call without the plane,
as ``HVDLAB_CUDA=0`` has it), ``copy`` (one copy of as many bytes on the GPU, by all ranks at once) and ``torch`` (``all_reduce`` of torch's own NCCL,
for which ranks that share a GPU are hosts of their own, joined by the loopback interface). A figure is the
median over the rounds of the slowest rank's time, in milliseconds. ``resnet50`` are the 161 gradients of a ResNet-50 as
one group. ``step`` is a training step of a small transformer, beside one process with the batch of all ranks; its cost
is mostly to launch small kernels, of which a GPU that processes share by turns gets less done. ``large step`` is one
that keeps the GPU busy, and ``recording`` the same with its spans recorded and not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import hvdlab
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.registry import why_unavailable

TESTS = str(Path(__file__).parents[1] / "tests")
"""Where ranks find ``support``."""

UNITS = {"K": 1 << 10, "M": 1 << 20}
ROUNDS, WARM = 15, 3
Call = Callable[[], object]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the parameters of a ResNet-50, in its order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            outer = 4 * inner
            convolutions = [(inner, width, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)]
            if block == 0:
                convolutions.append((outer, width, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            width = outer
    return [*shapes, (1000, 2048), (1000,)]


def wait_for_gpu(device: str) -> None:
    """Wait until this rank's GPU is done, if it uses one."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def measured(calls: dict[str, Call], device: str, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return milliseconds of each contender in each round, until the GPU has done it; they take turns."""
    import hvdlab.torch as hvd

    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM + rounds):
        for name, call in calls.items():
            wait_for_gpu(device)
            hvd.barrier()
            began = perf_counter_ns()
            call()
            wait_for_gpu(device)
            if turn >= WARM:
                times[name].append((perf_counter_ns() - began) / 1e6)
    return times


def on_rank(
    sizes: list[int], device: str, directory: str, has_steps: bool
) -> dict[str, dict[str, list[float]]]:
    """Return one rank's measurements, by the reduced data. Torch's ranks find each other by a file of the directory."""
    sys.path.insert(0, TESTS)
    import torch
    import torch.distributed as dist

    import hvdlab.torch as hvd
    from hvdlab.bindings.operations import Binding, Operation
    from hvdlab.collectives.types import SUM, OpKind
    from hvdlab.torch.adapter import ADAPTER, BINDING
    from support.real_gpu import become_host_of_nccl

    hvd.init()
    if device != "cpu":
        become_host_of_nccl(hvd.rank())
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{directory}/torch",
        rank=hvd.rank(),
        world_size=hvd.size(),
    )
    staging = Binding(ADAPTER)  # knows no devices: all goes through the host
    add = Operation(OpKind.ALLREDUCE, SUM)

    def contenders(tensor: torch.Tensor, name: str) -> dict[str, Call]:
        other = torch.empty_like(tensor)
        return {
            "plane": lambda: BINDING.run(add, tensor, f"{name}.plane", in_place=True),
            "staged": lambda: staging.run(add, tensor, f"{name}.staged", in_place=True),
            "copy": lambda: other.copy_(tensor),
            "torch": lambda: dist.all_reduce(tensor),
        }

    def contenders_of_group(tensors: list[torch.Tensor], name: str) -> dict[str, Call]:
        others = [torch.empty_like(tensor) for tensor in tensors]
        return {
            "plane": lambda: BINDING.submit_group(add, tensors, f"{name}.plane", in_place=True).wait(),
            "staged": lambda: staging.submit_group(add, tensors, f"{name}.staged", in_place=True).wait(),
            "copy": lambda: [other.copy_(tensor) for other, tensor in zip(others, tensors, strict=True)],
        }

    found = {
        str(size): measured(contenders(torch.zeros(size // 4, device=device), str(size)), device)
        for size in sizes
    }
    if has_steps:
        gradients = [torch.zeros(shape, device=device) for shape in resnet50_shapes()]
        found["resnet50"] = measured(contenders_of_group(gradients, "resnet50"), device)
        del gradients
        found["step"] = measured(steps(width=256, layers=4, tokens=128), device)
        large = steps(width=1024, layers=8, tokens=256)
        found["large step"] = measured(large, device)
        found["recording"] = measured(recorded_and_not(large["ranks"]), device, 3 * ROUNDS)
    dist.destroy_process_group()
    return found


def recorded_and_not(call: Call) -> dict[str, Call]:
    """Return the same with spans recorded, as always, and without."""
    from hvdlab.collectives import context

    recorder = context.engine().recorder

    def off() -> None:
        recorder.enabled = False
        try:
            call()
        finally:
            recorder.enabled = True

    return {"on": call, "off": off}


def steps(width: int, layers: int, tokens: int) -> dict[str, Call]:
    """A training step of a transformer with a share of the batch on each rank, and one of rank 0 alone with the whole batch."""
    import torch

    import hvdlab.torch as hvd

    def model() -> torch.nn.Module:
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()

    share, whole = model(), model()
    sharing = hvd.DistributedOptimizer(torch.optim.SGD(share.parameters(), 0.01), share.named_parameters())
    alone = torch.optim.SGD(whole.parameters(), 0.01)

    def step(network: torch.nn.Module, optimizer: Any, batch: int) -> None:
        optimizer.zero_grad()
        network(torch.ones(batch, tokens, width, device="cuda")).square().mean().backward()
        optimizer.step()

    batch = 64
    return {
        "ranks": lambda: step(share, sharing, batch // hvd.size()),
        "one process": lambda: step(whole, alone, batch) if hvd.rank() == 0 else None,
    }


def medians(each: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return medians of the slowest rank of each round."""
    return {
        name: statistics.median(max(times) for times in zip(*(found[name] for found in each), strict=True))
        for name in each[0]
    }


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, action="append", help="how many ranks; may be given several times"
    )
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M,256M", help="bytes of the reduced tensor")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plane", choices=("ipc", "nccl"), default="ipc", help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--sizes-only", action="store_true", help="leave out gradients and steps of training")
    options = parser.parse_args()
    if options.device != "cpu" and (reason := why_unavailable(f"cuda/{options.plane}")):
        sys.exit(reason)
    sizes = [size_of(text) for text in options.sizes.split(",")]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for ranks in options.ranks or [2, 4, 8]:
        with tempfile.TemporaryDirectory() as directory:
            environment = {gpu_plane.CHOICE: options.plane} if options.device != "cpu" else None
            arguments = (sizes, options.device, directory, not options.sizes_only)
            each = hvdlab.run(on_rank, args=arguments, np=ranks, env=environment)
        figures[str(ranks)] = {what: medians([found[what] for found in each]) for what in each[0]}
        for what, found in figures[str(ranks)].items():
            print(f"{ranks} ranks, {what}:", ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

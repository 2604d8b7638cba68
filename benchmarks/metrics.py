"""Costs of metrics on a rank: where they are recorded, and on the threads that do the rest.

Run it as ``python benchmarks/metrics.py [--json FILE]``; it prints one JSON object. It makes a world of one. Times are those of the
quickest of several rounds: other processes only add to them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import hvdlab.torch as hvd
from hvdlab.collectives import context
from hvdlab.collectives.metrics.export import Point, PointReader
from hvdlab.collectives.metrics.sampler import ProcessUsage
from hvdlab.torch.monitoring import gradient_norm

NARROW, WIDE = 64, 2048


def per_item(action: Callable[[int], object], items: int, rounds: int) -> float:
    """Return nanoseconds per item of the quickest round of ``action``, which is asked to do ``items`` of them."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        action(items)
        times.append((time.perf_counter_ns() - begin) / items)
        context.engine().recorder.drain()
    return round(min(times), 1)


def like_resnet_50() -> list[torch.Tensor]:
    """Return 161 parameters with gradients, 25.6 million numbers in all, most of them in few tensors."""
    sizes = [64] * 53 + [512] * 53 + [160_000] * 43 + [1_550_000] * 12
    parameters = [torch.zeros(size, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    return parameters


def of_calls(count: int, rounds: int) -> dict[str, float]:
    scalar, tensor = 0.5, torch.tensor(0.5)

    def metric(count: int) -> None:
        for step in range(count):
            hvd.metric("loss", scalar, step)

    def of_tensor(count: int) -> None:
        for step in range(count):
            hvd.metric("loss", tensor, step)

    def empty(count: int) -> None:
        for step in range(count):
            nothing("loss", scalar, step)

    def nothing(name: str, value: float, step: int) -> None:
        """Do nothing: the cost of the loop and of a call with as many arguments."""

    def off(count: int) -> None:
        context.engine().recorder.enabled = False
        metric(count)
        context.engine().recorder.enabled = True

    return {
        "metric_ns": per_item(metric, count, rounds),
        "metric_of_tensor_ns": per_item(of_tensor, count, rounds),
        "metric_when_off_ns": per_item(off, count, rounds),
        "empty_call_ns": per_item(empty, count, rounds),
    }


def of_sampling(rounds: int) -> dict[str, float]:
    usage = ProcessUsage()

    def sample(count: int) -> None:
        for _ in range(count):
            usage.sample()

    return {"sample_us": per_item(sample, 1000, rounds) / 1000}


def of_steps(count: int, rounds: int) -> dict[str, float]:
    """Measure an optimizer that does nothing, so that only the hooks are left."""

    class Still(torch.optim.Optimizer):
        def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            """Do nothing."""

    model = torch.nn.Linear(4, 4)

    def steps(optimizer: torch.optim.Optimizer) -> float:
        def run(count: int) -> None:
            for _ in range(count):
                optimizer.step()

        return per_item(run, count, rounds)

    bare, watched = Still(list(model.parameters())), Still(list(model.parameters()))
    hvd.watch(model, watched, batch_size=32, every=0)
    parameters = like_resnet_50()
    norms = per_item(lambda count: [gradient_norm(parameters) for _ in range(count)], 3, rounds)
    return {
        "watched_step_us": round((steps(watched) - steps(bare)) / 1000, 2),
        "gradient_norm_of_resnet_50_ms": round(norms / 1e6, 2),
    }


def of_exporting(count: int, rounds: int) -> dict[str, float]:
    """Measure the control thread's search for metrics in a batch; the exporter has a thread of its own."""
    recorder = context.engine().recorder
    for step in range(count):
        hvd.metric("loss", 0.5, step)
    batches = recorder.drain()
    reader, found = PointReader(), 0

    def read(count: int) -> list[list[Point]]:
        return [reader.read(batch) for batch in batches]

    found = sum(map(len, read(count)))
    return {
        "read_per_point_us": round(per_item(read, found, rounds) / 1000, 2),
        "bytes_per_metric": round(sum(map(len, batches)) / found, 1),
    }


def of_threads(seconds: float, intervals: Sequence[float]) -> dict[str, float]:
    """Return processor time of an idle rank's process, in percent of a core, by the seconds between samples."""
    result = {}
    for interval in intervals:
        hvd.shutdown()
        os.environ["HVDLAB_METRICS_INTERVAL"] = str(interval)
        hvd.init()
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result[f"idle_rank_sampled_every_{interval:g}s_percent"] = round(100 * used / seconds, 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HVDLAB_METRICS_INTERVAL"] = "0"
    hvd.init()
    result: dict[str, float | str] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **of_calls(arguments.count, arguments.rounds),
        **of_sampling(arguments.rounds),
        **of_steps(arguments.count, arguments.rounds),
        **of_exporting(arguments.count, arguments.rounds),
        **of_threads(arguments.seconds, (0, 1, 0.1)),
    }
    hvd.shutdown()
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Gain by priorities: steps of a network whose last layers are large, with and without them, over a slow network or on
one host.

    python benchmarks/priorities.py --rate 400M --json benchmarks/results/priorities.json    # two hosts; needs root
    python benchmarks/priorities.py --here                                                   # two ranks of this host

The network's first layers are small and its last ones large, as in VGG: the gradients that a backward pass computes first keep the cable
busy when those come that the next forward pass needs first. Three ways to make the same steps take turns:

* ``all at once``: wait for all gradients before the next forward pass, as optimizers do;
* ``in order``: each layer waits for its own gradient right before its forward pass; gradients are summed in the order of the backward pass;
* ``urgent first``: the same, with ``byteps``'s parts and priorities, so that those of the first layers go first.

A figure is the median over the rounds of the slowest rank's time for a step. ``first back`` is when the first layer's
gradient is there after a backward pass, by when all are: a share that depends less on the machine's other load. All
three must end with the same weights, to the bit. The hosts are network namespaces on this machine (``tests/support/network/namespaces.py``),
so the ranks share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import hvdlab.numpy as hvd
from hvdlab import kvstore
from hvdlab.collectives import context
from support.network.namespaces import Network, SlowLink, slow_missing
from support.ranks.on_hosts import PORT, RanksOnHosts
from support.ranks.resident import Ranks

WIDTHS = (256,) * 8 + (1024, 1024, 1024, 1024, 16)
BATCH = 256
LEARNING_RATE = 1e-3
#: Environment of a world without priorities: the coordinator orders entries as they are ready, and none has parts.
PLAIN = {"HVDLAB_SCHEDULING_CREDIT": "0", "BYTEPS_PARTITION_BYTES": str(1 << 40)}
WAYS = ("all at once", "in order", "urgent first")


class Trained:
    """On a rank: a network whose layers push their gradients in the backward pass and wait for them by the method
    ``way``."""

    def __init__(self, way: str) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.way = way
        self.store: Any = kvstore.create("byteps")
        self.layers = [torch.nn.Linear(wide, next_, bias=False) for wide, next_ in itertools.pairwise(WIDTHS)]
        self.flying: dict[int, kvstore.PushPull] = {}
        for place, layer in enumerate(self.layers):
            layer.weight.register_post_accumulate_grad_hook(
                lambda weight, place=place: self._push(place, weight)
            )
        torch.manual_seed(100 + self.store.rank)
        self.inputs = torch.randn(BATCH, WIDTHS[0])

    def _push(self, place: int, weight: Any) -> None:
        self.flying[place] = self.store.pushpull_async(place, weight.grad, priority=-place)

    def _update(self, place: int) -> None:
        """Wait for the layer's gradient of the last step, and take the step."""
        import torch

        flying = self.flying.pop(place, None)
        if flying is not None:
            flying.wait()
            weight = self.layers[place].weight
            with torch.no_grad():
                weight -= LEARNING_RATE * weight.grad
            weight.grad = None

    def _backward(self) -> None:
        import torch

        hidden = self.inputs
        for place, layer in enumerate(self.layers):
            self._update(place)
            hidden = torch.relu(layer(hidden))
        hidden.square().mean().backward()

    def step(self) -> float:
        """Run one step; return its seconds."""
        start = perf_counter()
        self._backward()
        if self.way == "all at once":
            self.finish()
        return perf_counter() - start

    def first_back(self) -> float:
        """Run one step; return when the first layer's gradient was there after the backward pass, by when all were."""
        self._backward()
        start = perf_counter()
        self._update(0)
        first = perf_counter()
        self.finish()
        return (first - start) / (perf_counter() - start)

    def finish(self) -> None:
        for place in range(len(self.layers)):
            self._update(place)

    def weights(self) -> list[bytes]:
        self.finish()
        return [layer.weight.detach().numpy().tobytes() for layer in self.layers]


MODELS: dict[str, Trained] = {}


def steps(way: str, count: int) -> tuple[list[float], float]:
    """Return on a rank the seconds of each step, and ``first back``. At the beginning and at the end of the steps,
    operations of one step are in flight."""
    model = MODELS.get(way) or MODELS.setdefault(way, Trained(way))
    hvd.barrier()
    return [model.step() for _ in range(count)], model.first_back()


def weights(way: str) -> tuple[list[bytes], str]:
    """Return on a rank the weights at the end, and the data plane."""
    return MODELS[way].weights(), context.engine().plane()


def main() -> None:
    from between_hosts import number  # a rank that imports this file has no benchmarks to import from

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=number, default=400e6, help="bits per second between the hosts")
    parser.add_argument("--delay", type=float, default=0.0005, help="seconds, in each direction")
    parser.add_argument("--here", action="store_true", help="two ranks of this host, over shared memory")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way has its turn")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of a turn, of which the first does not count"
    )
    parser.add_argument("--json", default="", help="file for the medians")
    arguments = parser.parse_args()
    if not arguments.here and (reason := slow_missing()):
        raise SystemExit(f"{reason}; --here measures on this host")
    with contextlib.ExitStack() as stack:
        if arguments.here:
            plain, urgent = (stack.enter_context(Ranks(2, env=env)) for env in (PLAIN, {}))
        else:
            link = SlowLink(delay=arguments.delay, rate=arguments.rate)
            network = stack.enter_context(Network(2, slow={1: link}))
            plain = stack.enter_context(RanksOnHosts(network, 1, env=PLAIN))
            urgent = stack.enter_context(RanksOnHosts(network, 1, env={"MASTER_PORT": str(PORT + 1)}))
        worlds = dict(zip(WAYS, (plain, plain, urgent), strict=True))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        shares: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(arguments.rounds + 1):
            for way, world in worlds.items():
                taken = world.run(steps, way, arguments.steps, timeout=300)
                if turn:
                    times[way] += [max(alike) for alike in zip(*(mine[1:] for mine, _ in taken), strict=True)]
                    shares[way] += [share for _, share in taken]
        ends = {way: world.run(weights, way, timeout=300) for way, world in worlds.items()}
    (first, plane), *others = [rank for way in WAYS for rank in ends[way]]
    assert all(rank == (first, plane) for rank in others), "the ways end with different weights"
    report(times, shares, plane, arguments)


def report(
    times: dict[str, list[float]],
    shares: dict[str, list[float]],
    plane: str,
    arguments: argparse.Namespace,
) -> None:
    """Print the medians, and write them to a file if one is given."""
    medians = {way: round(1e3 * statistics.median(taken), 1) for way, taken in times.items()}
    first = {way: round(statistics.median(found), 2) for way, found in shares.items()}
    load = round(os.getloadavg()[0], 1)
    mib = sum(4 * wide * next_ for wide, next_ in itertools.pairwise(WIDTHS)) / (1 << 20)
    print(f"{mib:.1f} MiB of gradients on {plane}, load {load}")
    for way, milliseconds in medians.items():
        print(
            f"{way:14} {milliseconds:9.1f} ms   {milliseconds / medians[WAYS[0]]:.2f}   first back {first[way]:.2f}"
        )
    if arguments.json:
        found = {
            "bits_per_second": None if arguments.here else arguments.rate,
            "delay_seconds": None if arguments.here else arguments.delay,
            "plane": plane,
            "mebibytes": round(mib, 1),
            "cores": os.cpu_count(),
            "load": load,
            "milliseconds": medians,
            "first_back": first,
        }
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    # Ranks look functions up in the module that this file is, which is not theirs named __main__.
    from priorities import main as run

    run()

"""Key-value stores of several workers with hvdlab and with MXNet's parameter servers, alternating, on the same machine.

    make mxnet                                                                # once: an environment with MXNet 1.9.1
    out/mxnet/bin/python benchmarks/kvstore.py --json benchmarks/results/kvstore.json    # about four minutes

Both run on the interpreter that this is called with, which needs MXNet for the comparison; without one only hvdlab is measured.
``pushpull`` is timed with two workers, pushes with four, and ``local`` and ``device`` in one process. Printed are medians over all turns, and hvdlab's time by MXNet's (below 1
hvdlab is quicker) or, for pushes and compression, its rate by MXNet's (above 1 it is quicker). ``memcpy`` is the time of one copy of as many bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
TIMES = {1 << 12: 200, 1 << 20: 40, 1 << 24: 6, 1 << 26: 3}
KEYS, KEY_ELEMENTS, PUSH_ROUNDS = 100, 1 << 14, 5
ARRAYS, ARRAY_BYTES = 4, 1 << 24
"""What one process pushes at a time."""
MOMENTUM = 0.9


# -- in a worker ------------------------------------------------------------------------------------------------------


class Hvdlab:
    """hvdlab's stores on numpy arrays."""

    def __init__(self) -> None:
        from hvdlab import kvstore

        self.create, self.sgd = kvstore.create, kvstore.optimizer.SGD
        self.array: Any = partial(np.ones, dtype=np.float32)  # as MXNet's arrays are

    def wait(self, array: Any) -> None:
        """Wait until the pulled values are there."""


class Mxnet:
    """MXNet's, on its arrays."""

    def __init__(self) -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import mxnet as mx
        self.create, self.sgd = mx.kv.create, mx.optimizer.SGD
        self.array = mx.nd.ones

    def wait(self, array: Any) -> None:
        """Wait until the pulled values are there."""
        array.wait_to_read()


def time_pushpulls(library: Hvdlab | Mxnet, label: str, *, optimizer: bool) -> dict[str, float]:
    """Return median milliseconds of a ``pushpull`` of each size."""
    store = library.create("dist_sync")
    if optimizer:
        store.set_optimizer(library.sgd(learning_rate=0.1, momentum=MOMENTUM))
    found = {}
    for key, (size, nbytes) in enumerate(SIZES.items()):
        shape = (nbytes // 4,)
        gradient, out = library.array(shape), library.array(shape)
        store.init(key, library.array(shape))
        samples = []
        for number in range(TIMES[nbytes] + 2):
            start = time.perf_counter()
            store.pushpull(key, gradient, out=out)
            library.wait(out)
            if number >= 2:
                samples.append(time.perf_counter() - start)
        store._barrier()
        found[f"pushpull {size}{label}"] = 1e3 * statistics.median(samples)
    return found


def time_pushes(library: Hvdlab | Mxnet) -> dict[str, float]:
    """Return pushes per second of all workers, until all are applied."""
    store = library.create("dist_async")
    store.set_optimizer(library.sgd(learning_rate=0.1, momentum=MOMENTUM))
    keys = list(range(KEYS))
    gradients = [library.array((KEY_ELEMENTS,)) for _ in keys]
    outs = [library.array((KEY_ELEMENTS,)) for _ in keys]
    store.init(keys, gradients)
    samples = []
    for _ in range(3):
        store._barrier()
        start = time.perf_counter()
        for _ in range(PUSH_ROUNDS):
            for key in keys:
                store.push(key, gradients[key])
        store.pull(keys, out=outs)
        for out in outs:
            library.wait(out)
        store._barrier()
        samples.append(PUSH_ROUNDS * KEYS * store.num_workers / (time.perf_counter() - start))
    return {f"dist_async, {KEYS} keys of {KEY_ELEMENTS * 4 >> 10} KiB, pushes/s": statistics.median(samples)}


def time_one_process(library: Hvdlab | Mxnet) -> dict[str, float]:
    """Return median milliseconds of a push of four arrays and a pull into them; and with compression the gigabytes of
    gradients per second."""
    found = {}
    shape = (ARRAY_BYTES // 4,)
    arrays, outs = ([library.array(shape) for _ in range(ARRAYS)] for _ in range(2))
    for kind, compressed in (("local", False), ("device", False), ("device", True)):
        store = library.create(kind)
        if compressed:
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.init(0, library.array(shape))
        samples = []
        for number in range(TIMES[ARRAY_BYTES] + 2):
            start = time.perf_counter()
            store.push(0, arrays)
            store.pull(0, out=outs)
            for out in outs:
                library.wait(out)
            if number >= 2:
                samples.append(time.perf_counter() - start)
        seconds = statistics.median(samples)
        if compressed:
            found[f"{kind}, 2bit, {ARRAYS} arrays of {ARRAY_BYTES >> 20} MiB, GB/s"] = (
                ARRAYS * ARRAY_BYTES / seconds / 1e9
            )
        else:
            found[f"{kind}, {ARRAYS} arrays of {ARRAY_BYTES >> 20} MiB"] = 1e3 * seconds
    return found


def work(name: str, what: str) -> None:
    """Run a worker's part; rank 0's prints its measurements."""
    library = Hvdlab() if name == "hvdlab" else Mxnet()
    # One store for each job: MXNet's servers end with the first that is given up.
    if what == "one process":
        found = time_one_process(library)
    elif what == "pushes":
        found = time_pushes(library)
    elif what == "updates":
        found = time_pushpulls(library, ", SGD with momentum", optimizer=True)
    else:
        found = time_pushpulls(library, "", optimizer=False)
    rank = int(os.environ.get("HVDLAB_RANK", os.environ.get("BENCHMARK_RANK", "0")))
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


# -- around the workers -----------------------------------------------------------------------------------------------


def command(name: str, what: str) -> list[str]:
    """Return how a worker is started."""
    return [sys.executable, str(Path(__file__).resolve()), "--work", name, "--what", what]


def result_of(output: str) -> dict[str, float]:
    """Return rank 0's output."""
    for line in output.splitlines():
        _, mark, text = line.partition("RESULT ")
        if mark:
            found: dict[str, float] = json.loads(text)
            return found
    raise SystemExit(f"no result in:\n{output}")


def run_hvdlab(workers: int, what: str) -> dict[str, float]:
    """Run one job of hvdlab's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "hvdlab", "run", "-np", str(workers), *command("hvdlab", what)]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, check=True, timeout=90)
    return result_of(done.stdout)


def run_mxnet(workers: int, servers: int, what: str) -> dict[str, float]:
    """Run one job of MXNet's: a scheduler, servers, workers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    common = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    roles = [sys.executable, "-W", "ignore", "-c", "import mxnet"]
    others = [subprocess.Popen(roles, env={**common, "DMLC_ROLE": "scheduler"})]
    others += [subprocess.Popen(roles, env={**common, "DMLC_ROLE": "server"}) for _ in range(servers)]
    started = [
        subprocess.Popen(
            command("mxnet", what),
            env={**common, "DMLC_ROLE": "worker", "BENCHMARK_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in started]
        for process in others:
            process.wait(60)
    finally:
        for process in (*started, *others):
            process.kill()
            process.wait()
    return result_of("\n".join(outputs))


def run_alone(name: str) -> dict[str, float]:
    """Run one process without others."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(name, "one process"), env=environment, capture_output=True, text=True, check=True, timeout=90
    )
    return result_of(done.stdout)


def copy_times() -> dict[str, float]:
    """Return milliseconds of one copy of each size."""
    found = {}
    for size, nbytes in SIZES.items():
        source, target = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
        samples = []
        for _ in range(TIMES[nbytes] + 2):
            start = time.perf_counter()
            np.copyto(target, source)
            samples.append(time.perf_counter() - start)
        found[f"memcpy {size}"] = 1e3 * statistics.median(samples[2:])
    return found


def main() -> None:
    """Measure, print, and write a file if one is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="how often each job runs")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--what", default="pushpull", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.what)
        return
    theirs = importlib.util.find_spec("mxnet") is not None
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def keep(who: str, found: dict[str, float]) -> None:
        for label, value in found.items():
            samples[who][label].append(value)

    for turn in range(options.turns):
        print(f"turn {turn + 1} of {options.turns}", file=sys.stderr, flush=True)
        keep("memcpy", copy_times())
        for what, workers in (("pushpull", 2), ("updates", 2), ("pushes", 4)):
            if theirs:
                for servers in (1, 2):
                    keep(f"MXNet, {servers} server{'s' * (servers > 1)}", run_mxnet(workers, servers, what))
            keep("hvdlab", run_hvdlab(workers, what))
        keep("hvdlab", run_alone("hvdlab"))
        if theirs:
            keep("MXNet, 1 server", run_alone("mxnet"))  # which it has nothing to do with
    report(samples, options.json)


def report(samples: dict[str, dict[str, list[float]]], path: Path | None) -> None:
    """Print a table of medians and ratios."""
    medians = {
        who: {label: statistics.median(values) for label, values in of.items()} for who, of in samples.items()
    }
    columns = [who for who in medians if who != "memcpy"]
    for label, value in medians["memcpy"].items():
        print(f"{label:45} {value:9.3f} ms")
    print(f"{'':45} " + " ".join(f"{who:>28}" for who in columns))
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for label in medians["hvdlab"]:
        cells = []
        for who in columns:
            value = medians[who].get(label)
            cell = "-" if value is None else f"{value:.3f}"
            if value is not None and who.startswith("MXNet"):
                ratios[label][who] = medians["hvdlab"][label] / value
                cell += f" ({ratios[label][who]:.2f})"
            cells.append(f"{cell:>28}")
        print(f"{label:45} " + " ".join(cells))
    if path is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
        result = {"machine": machine, "medians": medians, "hvdlab by MXNet": ratios, "samples": samples}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

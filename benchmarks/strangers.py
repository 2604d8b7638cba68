"""Costs of strangers at all ports of a pool for its training: steps with them and without, by turns.

    python benchmarks/strangers.py --json benchmarks/results/strangers.json            # four minutes
    python benchmarks/strangers.py --plane gloo --seconds 60

A pool of ranks trains with all open beside it that can be: ipyparallel's controller, parameter servers with ports for other
hosts. A process of strangers (``tests/chaos/strangers.py``: web pages and floods, also within TLS) goes
round all of these ports, so many visits a second, and keeps the connections that it is let keep.

On one machine the strangers themselves need processors, which they would not take from ranks if they came from another one. So there are
three kinds of blocks, by turns and the other way round: ``quiet``; ``decoy``, in which the same strangers visit as many ports of a process that
has nothing to do with the pool; and ``attacked``. The figure is the median over rounds of a step's time attacked against decoy,
with the interval in which that median lies with 95 % (bootstrap); attacked against quiet is printed as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from watching_cost import interval

from chaos import census
from chaos.strangers import STRANGERS
from hvdlab.kernel_ext.notebook.pool import Pool
from support.network.listening import listeners

BEGIN = """
import os, time, numpy as np, hvdlab.numpy as hvd
from hvdlab import kvstore
hvd.init()
os.environ["HVDLAB_HOST"] = f"host{hvd.rank()}"  # so that parameter servers listen for other hosts, too
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(3))
kv.barrier()
x = np.random.default_rng(0).random((400, 400), "f4")
gradients = [np.ones(size, "f4") for size in (250_000, 25_000, 1000, 10)]
"""
TRAIN = """
ends, sound = [], True
while not hvd.allreduce(np.array([float(os.path.exists(STOP))]), name="stop", op=hvd.Sum)[0]:
    x @ x
    for number, gradient in enumerate(gradients):
        sound &= bool((hvd.allreduce(gradient, name=f"gradient.{number}", op=hvd.Sum) == hvd.size()).all())
    ends.append(time.monotonic())
ends, sound
"""
ROUND = ("quiet", "decoy", "attacked", "attacked", "decoy", "quiet")
SETTLE = 0.3
"""Seconds of a block that do not count: strangers of the last one may still be there."""
KEPT = 200
"""Connections that strangers keep open."""


# -- the strangers' process -------------------------------------------------------------------------------------------


def attack(rate: float) -> None:
    """Visit the ports on the last line of standard input, until it ends; then print the acts."""
    os.nice(19)
    ports: list[int] = []
    held: deque[socket.socket] = deque()
    visits: Counter[str] = Counter()
    ended = threading.Event()

    def visit(port: int, number: int) -> None:
        stranger = STRANGERS[number % len(STRANGERS)]
        sock = socket.socket()
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", port))
            visits["connected"] += 1
            stranger(sock)
        visits["made"] += 1
        held.append(sock)
        while len(held) > KEPT:
            held.popleft().close()

    def go_round() -> None:
        due = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            for number in itertools.count():
                due = max(due + 1 / rate, time.monotonic() - 1)
                if ended.wait(max(0.0, due - time.monotonic())):
                    return
                if now := ports:
                    pool.submit(visit, now[(number // len(STRANGERS)) % len(now)], number)

    going = threading.Thread(target=go_round)
    going.start()
    for line in sys.stdin:
        ports = [int(word) for word in line.split()]
        while held:
            held.popleft().close()
    ended.set()
    going.join()
    print(json.dumps(visits))


def decoy(count: int) -> None:
    """Open as many ports, at which all clients are refused at once, until standard input ends."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    print(*(one.getsockname()[1] for one in listening), flush=True)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    for one in listening:
        threading.Thread(target=serve, args=(one,), daemon=True).start()
    sys.stdin.read()


@contextlib.contextmanager
def helper(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run this file as a process of its own."""
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait(30)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ[census.MARK] = mark = uuid.uuid4().hex
    os.environ |= {"HVDLAB_PRELOAD": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd-b-")))
        os.environ["IPYTHONDIR"] = str(directory / "ipython")
        pool = Pool.start(options.ranks, plane=options.plane, timeout=120)
        stack.callback(pool.stop)
        if errors := pool.run(BEGIN).errors:
            raise RuntimeError(f"the pool can't train: {errors}")
        if pool.cluster is None:
            raise RuntimeError("ipyparallel's controller did not come")
        places = [one.place for one in listeners([os.getpid(), *census.marked(mark)])]
        ports = sorted({int(place.rpartition(":")[2]) for place in places if not place.startswith("unix:")})
        stop = directory / "stop"
        others = stack.enter_context(helper("--decoy", str(len(ports))))
        strangers = stack.enter_context(helper("--attack", "--rate", str(options.rate)))
        assert others.stdout is not None
        targets = {
            "quiet": "",
            "decoy": others.stdout.readline().strip(),
            "attacked": " ".join(map(str, ports)),
        }

        run = pool.start_run(TRAIN.replace("STOP", repr(str(stop))))
        time.sleep(2)
        blocks = []
        begun = time.monotonic()
        while time.monotonic() < begun + options.seconds:
            for kind in ROUND:
                begin = time.monotonic()
                print(targets[kind], file=strangers.stdin, flush=True)
                time.sleep(options.block)
                blocks.append((kind, begin + SETTLE, time.monotonic()))
        stop.touch()
        results = run.wait(60)
        assert strangers.stdin is not None
        assert strangers.stdout is not None
        strangers.stdin.close()
        visits = json.loads(strangers.stdout.read())
        found = list(results)
        if not results.ok or not all(sound for _, sound in found):
            raise RuntimeError(f"something was lost: {results!r}")
        return {
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "load": [round(one, 1) for one in os.getloadavg()],
            "ranks": options.ranks,
            "plane": pool.plane,
            "ports": len(ports),
            "visits_per_second": options.rate,
            "visits": visits,
            **compared(blocks, found[0][0]),
        }


def compared(blocks: list[tuple[str, float, float]], ends: list[float]) -> dict[str, Any]:
    """Return times of steps by kind of block, and their ratios round by round."""
    steps: list[tuple[str, list[float]]] = []
    for kind, begin, end in blocks:
        inside = [one for one in ends if begin <= one <= end]
        steps.append((kind, [b - a for a, b in itertools.pairwise(inside)]))
    if not all(times for _, times in steps):
        raise RuntimeError("a block has no step: the machine is too busy, or the pool stands still")
    ratios: dict[str, list[float]] = {"decoy": [], "quiet": []}
    for number in range(0, len(steps), len(ROUND)):
        mean = {
            wanted: statistics.fmean(
                statistics.fmean(t) for kind, t in steps[number : number + len(ROUND)] if kind == wanted
            )
            for wanted in ROUND
        }
        for beside, values in ratios.items():
            values.append(100 * (mean["attacked"] / mean[beside] - 1))
    every = {wanted: [t for kind, times in steps if kind == wanted for t in times] for wanted in set(ROUND)}
    return {
        "rounds": len(ratios["decoy"]),
        "step_ms": {kind: round(1000 * statistics.median(times), 2) for kind, times in sorted(every.items())},
        "slowest_step_ms": {kind: round(1000 * max(times), 1) for kind, times in sorted(every.items())},
        "slower_percent": {
            f"than_{beside}": {
                "median": round(statistics.median(values), 1),
                "interval_95": [round(one, 1) for one in interval(values)],
            }
            for beside, values in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plane", default="auto")
    parser.add_argument("--seconds", type=float, default=180, help="of training (180)")
    parser.add_argument("--block", type=float, default=2, help="seconds of a block (2)")
    parser.add_argument("--rate", type=float, default=20, help="strangers' visits a second (20)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attack", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--decoy", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(options.rate)
    elif options.decoy is not None:
        decoy(options.decoy)
    else:
        text = json.dumps(measure(options), indent=1)
        print(text)
        if options.json is not None:
            options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()

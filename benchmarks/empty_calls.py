"""Ranks of hvdlab or actors of Monarch that are called with nothing, for ``versus_peers.py --costs``, which starts and measures this.

    python benchmarks/empty_calls.py hvdlab 4
    out/monarch/bin/python benchmarks/empty_calls.py monarch 4

Prints ``ready`` once PyTorch is imported on all of them. For each number that it then reads, it makes as many calls, and prints
the seconds of each as a list. It ends with its input. Monarch's environment has no hvdlab, and the other way round, so that each
is imported only where it is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def answer(call: Callable[[], object]) -> None:
    """Report that the ranks are ready, and answer each line of the input until it ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


def hvdlab(ranks: int) -> None:
    """Measure the cells of a pool."""
    from hvdlab.kernel_ext.notebook.pool import Pool

    with Pool.start(ranks) as pool:
        pool.run("import torch")
        answer(lambda: pool.run("pass"))


def monarch(ranks: int) -> None:
    """Measure an endpoint of actors, each of which has a process."""
    from monarch import actor  # type: ignore[import-not-found]  # only in the environment that `make monarch` makes

    class Rank(actor.Actor):  # type: ignore[misc]  # has no types here
        def __init__(self) -> None:
            import torch  # noqa: F401  (its import is part of the start)

        @actor.endpoint  # type: ignore[untyped-decorator]  # has no types here
        def empty(self) -> None:
            pass

    actors = actor.this_host().spawn_procs({"ranks": ranks}).spawn("rank", Rank)
    actors.empty.call().get()
    answer(lambda: actors.empty.call().get())
    actor.shutdown_context().get()


if __name__ == "__main__":
    {"hvdlab": hvdlab, "monarch": monarch}[sys.argv[1]](int(sys.argv[2]))

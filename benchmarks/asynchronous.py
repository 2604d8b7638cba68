"""Shares of the coordinator, of Python and of the data plane in a step of asynchronous allreduces.

    python benchmarks/asynchronous.py --ranks 2 --ranks 4     # about two minutes

The gradients of a model are reduced in four ways, which take turns in the same processes:

* ``asynchronous``: one ``allreduce_async_`` for each, then ``synchronize``, as users do;
* ``grouped``: all in one ``grouped_allreduce_``;
* ``unasked``: each is submitted and ended as before, but the ranks do not ask the coordinator, and go to the plane at once. That works since
  nothing departs from this program; it is the most that ranks could win which agree among themselves;
* ``plane``: the plane alone.

Printed are medians in milliseconds, the median over turns of each way's time by that of ``asynchronous``, and the same of
rank 0's processor time.
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
from typing import Any

import numpy as np
import numpy.typing as npt
from allreduce import resnet50_shapes

MODELS: dict[str, list[tuple[int, ...]]] = {
    "ResNet-50": resnet50_shapes(),
    "161 tensors of 64 numbers": [(64,)] * 161,
}
STEPS = 4
"""Steps of each way per turn."""

Array = npt.NDArray[np.float32]


class Ways:
    """The four ways on one rank."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        from hvdlab.collectives import context

        self._engine = context.engine()
        self._tensors: list[Array] = [np.ones(shape, np.float32) for shape in shapes]
        self._names = [f"gradient{number}" for number in range(len(shapes))]

    def asynchronous(self) -> None:
        import hvdlab.numpy as hvd

        pairs = zip(self._tensors, self._names, strict=True)
        for handle in [hvd.allreduce_async_(tensor, name, op=hvd.Max) for tensor, name in pairs]:
            hvd.synchronize(handle)

    def grouped(self) -> None:
        import hvdlab.numpy as hvd

        hvd.grouped_allreduce_(self._tensors, "gradients", op=hvd.Max)

    def unasked(self) -> None:
        from hvdlab.collectives.engine.entries import EXECUTING, Handle, RunBatch
        from hvdlab.collectives.engine.rank_state import RankState
        from hvdlab.collectives.engine.requests import Request
        from hvdlab.collectives.text import call_site
        from hvdlab.collectives.types import PLAIN, DType, OpKind, ReduceOp

        handles: list[Handle] = []

        def enter(state: RankState) -> None:
            state._enter(state.sets[0], handles[-1])
            handles[-1].phase, handles[-1].generation = EXECUTING, state.sets[0].generation
            handles[-1].received = time.monotonic_ns()

        for tensor, name in zip(self._tensors, self._names, strict=True):
            request = Request(OpKind.ALLREDUCE, name, tensor, tensor, DType.F32, PLAIN[ReduceOp.MAX])
            handles.append(Handle(self._engine, request, call_site(), time.monotonic_ns()))
            self._engine._locked.update(enter)
        batch = RunBatch(0, handles[0].generation, 1 << 31, 0, tuple(handles), ())
        self._with_plane(lambda _: self._engine._executor.run_now(batch))
        for handle in handles:
            handle.wait()

    def plane(self) -> None:
        from hvdlab.collectives.planes.base import PhaseTimes, buffer_of
        from hvdlab.collectives.types import PLAIN, DType, ReduceOp

        buffers = [buffer_of(tensor, DType.F32) for tensor in self._tensors]
        self._with_plane(
            lambda slot: slot.open().start_allreduce(
                buffers, buffers, DType.F32, PLAIN[ReduceOp.MAX], PhaseTimes()
            )
        )

    def _with_plane(self, work: Callable[[Any], object]) -> None:
        from hvdlab.collectives.planes.base import HOST

        executor, generation = self._engine._executor, self._engine._locked.generation(0)
        while not executor.with_idle_queue((0, generation, HOST), lambda slot: (work(slot), True)[1]):
            pass  # the last job is being put away


WAYS = ("asynchronous", "grouped", "unasked", "plane")


def rank_main(seconds: float) -> None:
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    engine = context.init()
    found: dict[str, Any] = {}
    for model, shapes in MODELS.items():
        ways = Ways(shapes)
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for way in WAYS:
            getattr(ways, way)()
        order, end = list(WAYS), time.monotonic() + seconds
        while hvd.allreduce(np.float64(time.monotonic() < end), "go on", op=hvd.Min) > 0:
            for way in order:
                hvd.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    getattr(ways, way)()
                wall, spent = time.perf_counter() - begin, time.process_time() - cpu
                taken[way].append((1000 * wall / STEPS, 1000 * spent / STEPS))
            order = order[1:] + order[:1]
        found[model] = {way: _summary(taken[way], taken["asynchronous"]) for way in WAYS}
    hvd.barrier()
    if engine.rank == 0:
        print(json.dumps(found), flush=True)
    context.shutdown()


def _summary(taken: list[tuple[float, float]], first: list[tuple[float, float]]) -> list[float]:
    pairs = list(zip(taken, first, strict=True))
    return [
        round(statistics.median(wall for wall, _ in taken), 2),
        round(statistics.median(mine[0] / other[0] for mine, other in pairs), 3),
        round(statistics.median(cpu for _, cpu in taken), 2),
        round(statistics.median(mine[1] / other[1] for mine, other in pairs), 3),
    ]


def measure(ranks: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

    coordinator = CoordinatorProcess.start(size=ranks)
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "HVDLAB_COORDINATOR": coordinator.address,
            "HVDLAB_TOKEN": coordinator.token,
            "HVDLAB_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--seconds", str(seconds), "--rank"]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        texts = [process.communicate()[0] for process in processes]
    finally:
        coordinator.close()
    found: dict[str, dict[str, list[float]]] = json.loads(texts[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="number of ranks; may be repeated")
    parser.add_argument("--seconds", type=float, default=25, help="for each model")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.seconds)
        return
    for ranks in options.ranks or [2, 4]:
        for model, ways in measure(ranks, options.seconds).items():
            print(f"{model}, {ranks} ranks")
            for way, (wall, ratio, cpu, cpu_ratio) in ways.items():
                print(f"    {way:13} {wall:8.2f} ms {ratio:6.2f}   {cpu:8.2f} ms of CPU {cpu_ratio:6.2f}")


if __name__ == "__main__":
    main()

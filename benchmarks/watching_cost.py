"""Costs of recording and streaming on the ranks; a part of ``watching.py``.

A shared machine is noisy: one block of steps differs from the next by a tenth and more. So ranks do many short blocks with
their recorder on and off by turns, in the order on, off, off, on and the other way round, and each four of them gives one
ratio: other load hits both. A figure is the median ratio, with the interval in which that median lies with 95 %
(bootstrap). ``step`` is time, ``cpu_of_step`` the processor time of the ranks' threads, which other load disturbs less.

A block ends when all that it has recorded is sent, so that the sending is paid by the block that recorded it; that wait is
in ``cpu_of_step`` and not in ``step``.

``direct`` does the same with 161 tensors of 64 bytes, of which recording is a much greater share: its ns per span do
not depend on the tensors' size, so that their ratio to the time of a real step gives the same more precisely.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from watched import MEASURE, WAIT_MS, wait_for, watched, watched_unseen

SPANS = 161  # of a step: the gradients of a ResNet-50
Block = tuple[
    str, bool, float, float
]  # which tensors, whether recorded, seconds and processor seconds of a step

COST = """\
%%hvd_run
import itertools
large, recorder = [torch.zeros(shape) for shape in shapes()], context.engine().recorder
def block(name, on, tensors, steps):
    hvd.barrier()
    recorder.enabled = on
    hvd.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps): step(tensors)
    wall = time.perf_counter() - wall
    time.sleep({settle})
    return name, on, wall / steps, (time.process_time() - cpu) / steps
for _ in range(3): step(large)
while not os.path.exists('go'): time.sleep(0.05)
blocks, begun = [], time.monotonic()
for k in itertools.count():
    going = torch.tensor([float(time.monotonic() < begun + {seconds})])
    if hvd.allreduce(going, name='going', op=hvd.Sum).item() < hvd.size(): break
    name, tensors, steps = ('direct', small, {small_steps}) if k % 3 == 2 else ('real', large, {steps})
    order = [True, False, False, True] if k % 2 else [False, True, True, False]
    blocks += [block(name, on, tensors, steps) for on in order]
recorder.enabled = True
with open(f'blocks-{{hvd.rank()}}.new', 'w') as file: json.dump(blocks, file)
os.rename(f'blocks-{{hvd.rank()}}.new', f'blocks-{{hvd.rank()}}.json')
"""
SETTLE = 0.13
"""Seconds in which a rank has sent what it recorded: it does so every 0.1."""


def cost(options: argparse.Namespace) -> dict[str, Any]:
    measure = COST.format(
        seconds=options.seconds, settle=SETTLE, steps=options.steps, small_steps=options.small_steps
    )
    found = {"streamed to a client that does not draw": compared(unseen(options, measure))}
    print(found, flush=True)
    if options.browser:
        found["streamed and drawn on the same cores"] = compared(drawn(options, measure))
    return found


def unseen(options: argparse.Namespace, measure: str) -> list[list[Block]]:
    with watched_unseen(options.ranks) as kernel:
        running = kernel.start(measure)
        (kernel.directory / "go").touch()
        kernel.wait(running, options.seconds + 120)
        if not any(view.rows for view in kernel.views):
            raise RuntimeError("nothing was streamed")
        return [wait_for(kernel.directory / f"blocks-{rank}.json") for rank in range(options.ranks)]


def drawn(options: argparse.Namespace, measure: str) -> list[list[Block]]:
    with watched(options.ranks, measure) as (lab, work):
        lab.run(MEASURE)
        lab.page.wait_for_function(
            f"document.querySelector('.hvd-timeline').hvdlab.summary().spans >= {SPANS} * 3", timeout=WAIT_MS
        )
        (work / "go").touch()
        return [wait_for(work / f"blocks-{rank}.json") for rank in range(options.ranks)]


def compared(of_ranks: list[list[Block]]) -> dict[str, Any]:
    """Recording against none, by fours, over all ranks."""
    result: dict[str, Any] = {"fours": {}}
    for column, name in ((2, "step"), (3, "cpu_of_step")):
        fours: dict[str, list[tuple[float, float]]] = {"real": [], "direct": []}
        means = [statistics.fmean(float(one[column]) for one in same) for same in zip(*of_ranks, strict=True)]
        for i in range(0, len(means), 4):
            four = list(zip(of_ranks[0][i : i + 4], means[i : i + 4], strict=True))
            on, off = (
                statistics.fmean(mean for one, mean in four if one[1] is want) for want in (True, False)
            )
            fours[four[0][0][0]].append((on, off))
        result["fours"] = {kind: len(one) for kind, one in fours.items()}
        result[name] = against(fours["real"], fours["direct"])
    return result


def against(real: list[tuple[float, float]], direct: list[tuple[float, float]]) -> dict[str, Any]:
    """Return figures of times in seconds, recorded and not."""
    off = statistics.median(without for _, without in real)
    ratios = [100 * (recorded / without - 1) for recorded, without in real]
    more = [recorded - without for recorded, without in direct]
    middle, (low, high) = statistics.median(more), interval(more)
    return {
        "off_ms": round(1000 * off, 2),
        "more_percent": round(statistics.median(ratios), 2),
        "more_percent_95": [round(one, 2) for one in interval(ratios)],
        "direct": {
            "off_ms": round(1000 * statistics.median(without for _, without in direct), 2),
            "ns_per_span": round(middle / SPANS * 1e9),
            "ns_per_span_95": [round(one / SPANS * 1e9) for one in (low, high)],
            "more_percent": round(100 * middle / off, 2),
            "more_percent_95": [round(100 * one / off, 2) for one in (low, high)],
        },
    }


def interval(values: list[float], rounds: int = 4000) -> tuple[float, float]:
    """Return where the median lies with 95 %."""
    chance = random.Random(7)
    found = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(rounds))
    return found[int(0.025 * rounds)], found[int(0.975 * rounds)]

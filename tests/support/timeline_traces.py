"""Made-up traces with known times, as ranks would record them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hvdlab.collectives.tracing.record_format import (
    CellBeginEvent,
    CellEndEvent,
    Event,
    Members,
    Metric,
    Span,
    encode,
)
from hvdlab.collectives.types import DType, OpKind

START_NS = 5_000_000_000


def steps(
    ranks: int,
    count: int,
    *,
    layers: int = 40,
    fused: int = 8,
    seed: int = 0,
    known_size: bool = True,
    slow_rank: int | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yield batches of a training of ``count`` steps in which ``layers`` gradients are reduced, ``fused`` at a time.

    Gradients become ready while earlier ones are still under way, and one rank of each step is slow, by default any:
    as in reality.
    """
    random_source = random.Random(seed)
    clock = START_NS
    sequence = 0
    for rank in range(ranks):
        first: list[Event] = [CellBeginEvent("7", clock - 1000)]
        if known_size:
            first.append(Members(0, 0, ranks, clock - 2000))
        yield rank, encode(rank, first)
    for step in range(count):
        any_rank = random_source.randrange(ranks)
        slow = any_rank if slow_rank is None else slow_rank
        events: list[list[Event]] = [[] for _ in range(ranks)]
        executor = [clock] * ranks
        arrivals = [_arrivals(random_source, clock, layers, rank == slow) for rank in range(ranks)]
        for begin in range(0, layers, fused):
            names = range(begin, min(begin + fused, layers))
            sequence += 1
            released = max(arrivals[rank][i] for rank in range(ranks) for i in names) + 40_000
            began = [
                max(released + random_source.randrange(5000, 20_000), executor[rank]) for rank in range(ranks)
            ]
            ended = max(began) + random_source.randrange(200_000, 500_000)
            for rank in range(ranks):
                wait = max(began) - began[rank] + 700
                length = ended - began[rank] - wait
                for i in names:
                    events[rank].append(
                        Span(
                            f"grad.layer{i}.weight",
                            OpKind.ALLREDUCE,
                            DType.F32,
                            0,
                            sequence,
                            0,
                            4096 * (i + 1),
                            arrivals[rank][i],
                            released,
                            began[rank],
                            ended,
                            length // 5,
                            length // 2,
                            wait,
                            length // 5,
                        )
                    )
                executor[rank] = ended
        clock = max(executor) + 100_000
        for rank in range(ranks):
            events[rank].append(Metric("loss", 1 / (step + 1), step, clock))
            yield rank, encode(rank, events[rank])
    for rank in range(ranks):
        yield rank, encode(rank, [CellEndEvent("7", clock + 1000, True)])


def _arrivals(random_source: random.Random, clock: int, layers: int, slow: bool) -> list[int]:
    pace = 90_000 if slow else 50_000
    return [clock + (i + 1) * pace + random_source.randrange(10_000) for i in range(layers)]

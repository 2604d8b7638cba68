"""The sampler of a rank: which sources it samples."""

from __future__ import annotations

from hvdlab.collectives.metrics.gpus import GpuUsage
from hvdlab.collectives.metrics.process import ProcessUsage
from hvdlab.collectives.metrics.sampler import Record, Sampler, Source


def sampler_of_rank(record: Record, interval: float, rank: int) -> Sampler | None:
    """Begin to sample this process and its GPUs every ``interval`` seconds; ``None`` if that is 0."""
    return Sampler(record, _sources, interval, str(rank)) if interval > 0 else None


def _sources() -> list[Source]:
    gpus = GpuUsage.find()
    return [ProcessUsage()] if gpus is None else [ProcessUsage(), gpus]

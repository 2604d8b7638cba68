"""How long and how carefully to tune."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Settings of the tuner.

    Attributes:
        warmup_samples: Samples at the beginning that do not count.
        steps_per_sample: How often a sample sees the same tensor.
        max_samples: Samples after which the best setting is kept.
        noise: How much of the scores' variance is taken for noise.
    """

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8

"""The tuner as a pure state machine: what was executed and the time go in, settings come out.

A *sample* ends when a tensor has been executed ``steps_per_sample`` times since it began; its score is the bytes that
were executed per second. After the warm-up, the first settings are spread over the space; later ones are where a
Gaussian process of the scores so far expects most. In the end the one with the best expected score is kept.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from hvdlab.collectives.autotune.gaussian import GaussianProcess
from hvdlab.collectives.autotune.options import TuningOptions
from hvdlab.collectives.autotune.parameters import Parameters, Space

LEAST_SECONDS = 0.05
"""A sample lasts at least this long: shorter ones tell more of the machine's noise than of the setting."""
SPREAD = 4
"""Samples that are spread over the space before the process is asked."""
_TENSORS = 16384


class Phase(StrEnum):
    """What a sample was for."""

    WARMUP = "warmup"
    SAMPLE = "sample"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the log.

    Attributes:
        number: From 1.
        phase: ``BEST`` for the setting that is kept, with the score that is expected of it.
        parameters: The setting.
        score: Bytes per second.
    """

    number: int
    phase: Phase
    parameters: Parameters
    score: float

    @staticmethod
    def header() -> str:
        return "sample,phase,fusion_threshold_bytes,flush_delay_ms,slice_bytes,score_bytes_per_second"

    def line(self) -> str:
        p = self.parameters
        return (
            f"{self.number},{self.phase},{p.fusion_threshold},{p.flush_delay * 1000:g},{p.slice_bytes},"
            f"{self.score:.0f}"
        )


class Tuner:
    """Looks for the best setting.

    Args:
        options: How long and how carefully.
        start: The setting to begin with; the first sample that counts is made with it.
        space: The settings to choose from.
        seed: The same seed and scores give the same settings.

    Attributes:
        parameters: The setting to use now.
        done: Whether it is the best, and stays.
    """

    def __init__(
        self, options: TuningOptions, start: Parameters, space: Space | None = None, seed: int = 0
    ) -> None:
        self._options = options
        self._space = space or Space()
        self._random = random.Random(seed)
        self.parameters = start
        self.done = False
        self._scores: list[tuple[Parameters, float]] = []
        self._number = 0
        self._begin: float | None = None
        self._counts: dict[Hashable, int] = {}
        self._most = 0
        self._bytes = 0

    def executed(self, tensors: Iterable[tuple[Hashable, int]]) -> None:
        """These (which, bytes) were told to be executed."""
        counts = self._counts
        for name, nbytes in tensors:
            count = counts.get(name, 0) + 1
            if len(counts) < _TENSORS:
                counts[name] = count
            self._most = max(self._most, count)
            self._bytes += nbytes

    def advance(self, now: float) -> Sample | None:
        """Look at the clock after something was executed; returns the sample that ended, if one did.

        The setting may be another one afterwards.
        """
        if self.done or not self._bytes:
            return None
        if self._begin is None:  # what was executed until now was submitted under the setting before
            self._start(now)
            return None
        elapsed = now - self._begin
        if self._most < self._options.steps_per_sample or elapsed < LEAST_SECONDS:
            return None
        return self._end(self._bytes / elapsed)

    def finish(self) -> Sample | None:
        """The line about the setting that is kept; once, after the last sample."""
        if self.done or len(self._scores) < self._options.max_samples:
            return None
        process = self._process()
        measured = dict.fromkeys(parameters for parameters, _ in self._scores)
        score, self.parameters = max(
            ((process.predict(self._space.point(p))[0], p) for p in measured), key=lambda pair: pair[0]
        )
        self.done = True
        self._counts.clear()
        return Sample(self._number + 1, Phase.BEST, self.parameters, score)

    def _start(self, now: float | None) -> None:
        self._begin = now
        self._counts.clear()
        self._most = self._bytes = 0

    def _end(self, score: float) -> Sample:
        self._start(None)
        self._number += 1
        warmup = self._number <= self._options.warmup_samples
        sample = Sample(self._number, Phase.WARMUP if warmup else Phase.SAMPLE, self.parameters, score)
        if not warmup:
            self._scores.append((self.parameters, score))
            self.parameters = self._next()
        return sample

    def _next(self) -> Parameters:
        tried = {parameters for parameters, _ in self._scores}
        if len(self._scores) < SPREAD:
            return self._farthest(tried)
        process = self._process()
        best = process.best()
        candidates = self._space.all
        # The order breaks ties, and must not favour one corner.
        order = self._random.sample(range(len(candidates)), len(candidates))
        chosen = max(
            order, key=lambda i: process.expected_improvement(self._space.point(candidates[i]), best)
        )
        return candidates[chosen]

    def _farthest(self, tried: set[Parameters]) -> Parameters:
        """The setting that is farthest from all that were tried, or nearly so."""
        points = [self._space.point(p) for p in tried]
        few = self._random.sample(self._space.all, min(24, len(self._space.all)))

        def distance(parameters: Parameters) -> float:
            here = self._space.point(parameters)
            return min(sum((a - b) ** 2 for a, b in zip(here, point, strict=True)) for point in points)

        return max(few, key=distance)

    def _process(self) -> GaussianProcess:
        points = [self._space.point(p) for p, _ in self._scores]
        # Noise is the share of the variance; a process wants it beside the share that is left.
        return GaussianProcess(points, [score for _, score in self._scores], self._options.noise**2)

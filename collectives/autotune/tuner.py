"""The tuner as a pure state machine: what was executed and the time go in, settings come out.

A *sample* ends when a tensor has been executed ``steps_per_sample`` times since it began; its score is the bytes that
were executed per second. After the warm-up, the first settings are spread over the space; later ones are where a
Gaussian process of the scores so far expects most. In the end the one with the best expected score is compared with the
setting to begin with, in turns: scores of a busy machine differ by more than most settings do, and the best of many
noisy scores is often only the luckiest. It is kept if it wins most of these turns.
"""

from __future__ import annotations

import random
import statistics
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
TURNS = 5
"""How often the setting that was found and the one to begin with are measured beside each other."""
WINS = 4
"""Turns that the one that was found has to win."""
_TENSORS = 16384


class Phase(StrEnum):
    """What a sample was for."""

    WARMUP = "warmup"
    SAMPLE = "sample"
    CHECK = "check"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the log.

    Attributes:
        number: From 1.
        phase: ``CHECK`` for the turns at the end; ``BEST`` for the setting that is kept, with its median score in them.
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
        self._given = start
        self._scores: list[tuple[Parameters, float]] = []
        self._found: Parameters | None = None
        self._checks: dict[Parameters, list[float]] = {}
        self._number = 0
        self._begin: float | None = None
        self._counts: dict[Hashable, int] = {}
        self._most = 0
        self._bytes = 0

    def executed(self, tensors: Iterable[tuple[Hashable, int]]) -> None:
        """The coordinator has ordered these tensors: what names each, and its size in bytes."""
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
        """The sample that describes the setting that is kept; returned once, after the last sample, else ``None``."""
        if self.done or self._found is None or self._turn() is not None:
            return None
        given, found = self._checks[self._given], self._checks[self._found]
        wins = sum(b > a for a, b in zip(given, found, strict=True))
        self.parameters = self._found if wins >= WINS else self._given
        score = statistics.median(self._checks[self.parameters])
        self.done = True
        self._counts.clear()
        return Sample(self._number + 1, Phase.BEST, self.parameters, score)

    def _turn(self) -> Parameters | None:
        """Which of the two settings to measure next; ``None`` if both were measured often enough."""
        assert self._found is not None
        order = (self._given, self._found)
        # a b  b a  a b …: what drifts hits both alike
        done = sum(len(scores) for scores in self._checks.values())
        if done >= len(self._checks) * TURNS:
            return None
        turn, place = divmod(done, 2)
        return order[place ^ turn % 2] if self._found != self._given else self._given

    def _expected_best(self) -> Parameters:
        process = self._process()
        measured = dict.fromkeys(parameters for parameters, _ in self._scores)
        return max(measured, key=lambda p: process.predict(self._space.point(p))[0])

    def _start(self, now: float | None) -> None:
        self._begin = now
        self._counts.clear()
        self._most = self._bytes = 0

    def _end(self, score: float) -> Sample:
        self._start(None)
        self._number += 1
        if self._found is not None:
            sample = Sample(self._number, Phase.CHECK, self.parameters, score)
            self._checks[self.parameters].append(score)
            self.parameters = self._turn() or self.parameters
            return sample
        if self._number <= self._options.warmup_samples:
            return Sample(self._number, Phase.WARMUP, self.parameters, score)
        sample = Sample(self._number, Phase.SAMPLE, self.parameters, score)
        self._scores.append((self.parameters, score))
        if len(self._scores) < self._options.max_samples:
            self.parameters = self._next()
        else:
            self._found = self._expected_best()
            self._checks = {self._given: [], self._found: []}
            self.parameters = self._given
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

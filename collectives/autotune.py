"""Tuner of how tensors are fused and moved: executed tensors and the time go in, settings come out. Imports no numpy, as the coordinator does.

A *sample* ends when a tensor has been executed ``steps_per_sample`` times since it began; its score is the bytes that
were executed per second. After the warm-up the tuner sweeps one axis after the other: it measures each value of an axis with the best
values of the other axes so far, and keeps the fastest. In the end the best setting is compared with the
setting to begin with, in turns: scores of a busy machine differ by more than most settings do, and the best of many
noisy scores is often only the luckiest. It is kept if it wins most of these turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

KIB, MIB = 1024, 1024 * 1024

LEAST_SECONDS = 0.05
"""A sample lasts at least this long: shorter ones depend more on the machine's noise than on the setting."""
TURNS = 5
"""How often the setting that was found and the one to begin with are measured beside each other; odd, for the median."""
WINS = 4
"""Turns that the one that was found has to win."""
_TENSORS = 16384
"""Names of tensors that a sample counts by; those beyond still count with their bytes."""

AXES: dict[str, Sequence[Any]] = {
    "fusion_threshold": (0, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    "flush_delay": (0.0, 0.0002, 0.0005, 0.001, 0.0025, 0.005),
    "slice_bytes": (0, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB),
}
"""The values to try, by attribute of :class:`Parameters`, in the order in which they are swept: the threshold matters most."""


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """Settings of the tuner.

    Attributes:
        warmup_samples: Samples at the beginning that do not count.
        steps_per_sample: How often a sample sees the same tensor.
        max_samples: Samples after which the best setting is kept, also in the middle of a sweep. A whole sweep has 16.
    """

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20


@dataclass(frozen=True, slots=True)
class Parameters:
    """Setting of the three parameters.

    Attributes:
        fusion_threshold: Bytes that are fused into one operation at most.
        flush_delay: Seconds that the coordinator waits for more tensors before it orders those that are ready.
        slice_bytes: Bytes that a member moves at a time through shared memory; 0 leaves it to the plane.
    """

    fusion_threshold: int
    flush_delay: float
    slice_bytes: int = 0


class TuningPhase(StrEnum):
    """Purpose of a sample."""

    WARMUP = "warmup"
    SAMPLE = "sample"
    CHECK = "check"
    BEST = "best"


@dataclass(frozen=True, slots=True)
class TuningSample:
    """Sample of the tuner: one line of the log.

    Attributes:
        number: From 1.
        phase: ``CHECK`` for the turns at the end; ``BEST`` for the setting that is kept, with its median score in them.
        parameters: The setting.
        score: Bytes per second.
    """

    number: int
    phase: TuningPhase
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
    """Search for the setting with which most bytes per second are executed.

    Args:
        options: How long and how carefully.
        start: The setting to begin with; the first sample that counts is made with it.

    Attributes:
        parameters: The setting to use now.
        done: Whether they are the best, and stay.
    """

    def __init__(self, options: TuningOptions, start: Parameters) -> None:
        self._options = options
        self.parameters = start
        self.done = False
        #: The setting to begin with.
        self._given = start
        #: Bytes per second of each setting that was measured.
        self._scores: dict[Parameters, float] = {}
        #: Names of the axes that were not swept yet, and the settings of the present one that were not measured yet.
        self._axes = list(AXES)
        self._untried: list[Parameters] = []
        #: The fastest setting, once the sweep is over.
        self._found: Parameters | None = None
        #: Scores of the turns at the end, by setting.
        self._checks: dict[Parameters, list[float]] = {}
        #: Number of the last sample.
        self._number = 0
        #: Time at which the present sample began.
        self._begin: float | None = None
        #: Executions by tensor, the most of a tensor, and bytes, since the sample began.
        self._counts: dict[Hashable, int] = {}
        self._most = 0
        self._bytes = 0

    def executed(self, tensors: Iterable[tuple[Hashable, int]]) -> None:
        """Count tensors that the coordinator has ordered, each with its name and its size in bytes."""
        counts = self._counts
        for name, nbytes in tensors:
            count = counts.get(name, 0) + 1
            # A tensor that is counted already takes no more room: without its count the sample would never end.
            if count > 1 or len(counts) < _TENSORS:
                counts[name] = count
            self._most = max(self._most, count)
            self._bytes += nbytes

    def advance(self, now: float) -> TuningSample | None:
        """Return the sample that ended by this time, if one did. The setting can be another one afterwards."""
        if self.done or not self._bytes:
            return None
        if self._begin is None:  # tensors until now were submitted under the setting before
            self._start(now)
            return None
        elapsed = now - self._begin
        if self._most < self._options.steps_per_sample or elapsed < LEAST_SECONDS:
            return None
        return self._end(self._bytes / elapsed)

    def finish(self) -> TuningSample | None:
        """Return the sample that describes the setting that is kept: once, after the last sample; None otherwise."""
        if self.done or self._found is None or self._turn() is not None:
            return None
        given, found = self._checks[self._given], self._checks[self._found]
        wins = sum(b > a for a, b in zip(given, found, strict=True))
        self.parameters = self._found if wins >= WINS else self._given
        score = sorted(self._checks[self.parameters])[TURNS // 2]
        self.done = True
        self._counts.clear()
        return TuningSample(self._number + 1, TuningPhase.BEST, self.parameters, score)

    def _turn(self) -> Parameters | None:
        """Return the one of both settings to measure next; None if both were measured often enough."""
        assert self._found is not None
        order = (self._given, self._found)
        # a b  b a  a b …: a machine that becomes slower hits both alike
        done = sum(len(scores) for scores in self._checks.values())
        if done >= len(self._checks) * TURNS:
            return None
        turn, place = divmod(done, 2)
        return order[place ^ turn % 2] if self._found != self._given else self._given

    def _start(self, now: float | None) -> None:
        self._begin = now
        self._counts.clear()
        self._most = self._bytes = 0

    def _end(self, score: float) -> TuningSample:
        self._start(None)
        self._number += 1
        if self._found is not None:
            sample = TuningSample(self._number, TuningPhase.CHECK, self.parameters, score)
            self._checks[self.parameters].append(score)
            self.parameters = self._turn() or self.parameters
            return sample
        if self._number <= self._options.warmup_samples:
            return TuningSample(self._number, TuningPhase.WARMUP, self.parameters, score)
        sample = TuningSample(self._number, TuningPhase.SAMPLE, self.parameters, score)
        self._scores[self.parameters] = score
        following = self._next() if len(self._scores) < self._options.max_samples else None
        if following is not None:
            self.parameters = following
            return sample
        self._found = self._best()
        # One entry if the sweep has found the setting to begin with: then only its own median is measured.
        self._checks = {self._given: [], self._found: []}
        self.parameters = self._given
        return sample

    def _best(self) -> Parameters:
        return max(self._scores, key=self._scores.__getitem__)

    def _next(self) -> Parameters | None:
        """Return the setting to measure next; None once all axes were swept."""
        while not self._untried and self._axes:
            axis, best = self._axes.pop(0), self._best()
            settings = [replace(best, **{axis: value}) for value in AXES[axis]]
            self._untried = [setting for setting in settings if setting not in self._scores]
        return self._untried.pop(0) if self._untried else None

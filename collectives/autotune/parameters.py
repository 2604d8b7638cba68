"""What can be tuned while an application runs, and between which values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from hvdlab.collectives.autotune.gaussian import Point

KIB, MIB = 1024, 1024 * 1024

FUSION_THRESHOLDS = (0, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
FLUSH_DELAYS = (0.0, 0.0002, 0.0005, 0.001, 0.0025, 0.005)
SLICES = (0, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB)


@dataclass(frozen=True, slots=True)
class Parameters:
    """One setting.

    Attributes:
        fusion_threshold: Bytes that are fused into one operation at most.
        flush_delay: Seconds that what is ready is held for more.
        slice_bytes: Bytes that a member moves at a time through shared memory; 0 leaves it to the plane.
    """

    fusion_threshold: int
    flush_delay: float
    slice_bytes: int = 0


class Space:
    """All combinations of some values, as points of the unit cube at equal distances along each axis."""

    def __init__(
        self,
        thresholds: Sequence[int] = FUSION_THRESHOLDS,
        delays: Sequence[float] = FLUSH_DELAYS,
        slices: Sequence[int] = SLICES,
    ) -> None:
        self._axes: tuple[tuple[float, ...], ...] = (tuple(thresholds), tuple(delays), tuple(slices))
        self.all = [Parameters(int(t), d, int(s)) for t, d, s in itertools.product(*self._axes)]

    def point(self, parameters: Parameters) -> Point:
        """The point of the unit cube that stands for a setting. A value between two of an axis lies between their places."""
        return tuple(_place(axis, value) for axis, value in zip(self._axes, astuple(parameters), strict=True))


def _place(axis: Sequence[float], value: float) -> float:
    last = len(axis) - 1
    if last == 0 or value <= axis[0]:
        return 0.0
    for i in range(last):
        low, high = axis[i], axis[i + 1]
        if value <= high:
            return (i + (value - low) / (high - low)) / last
    return 1.0

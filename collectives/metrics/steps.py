"""How long training steps take, and how many samples they get through."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics import names


class StepMeter:
    """Records the time from the end of each step to the end of the next.

    A step that ended in another cell or another world than the next does not count: between them the user was thinking.

    Attributes:
        count: Steps so far; set it to go on where an earlier training ended.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.count = 0
        self._now_ns = now_ns
        self._batch_size: float | None = None
        self._before: tuple[int, object] | None = None

    @property
    def batch_size(self) -> float | None:
        """Samples that this rank trains with in a step; ``None`` if that is not known."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, samples: float | None) -> None:
        if samples is not None and not 0 < samples < float("inf"):
            raise InvalidRequestError(f"batch_size= is the number of samples in a step, not {samples!r}.")
        self._batch_size = samples

    def pause(self) -> None:
        """The time from now until the end of the next step does not count as the time of a step."""
        self._before = None

    def step(self, steps: int = 1) -> None:
        """A step has ended now; or several, which can't be told apart: then each took its part of the time."""
        now = self._now_ns()
        self.count += steps
        if not context.is_initialized():
            self._before = None
            return
        engine = context.engine()
        where = (id(engine), engine.cells_begun)
        if self._before is not None and self._before[1] == where:
            seconds = max(now - self._before[0], 1) / 1e9 / steps
            engine.metric(names.STEP_TIME, seconds, self.count, now)
            if self._batch_size is not None:
                engine.metric(names.SAMPLES_PER_SECOND, self._batch_size / seconds, self.count, now)
        self._before = now, where

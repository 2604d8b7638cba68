"""What the watches of all frameworks have in common: whose steps count, how many samples these have, and how numbers are recorded.

A framework's ``watch()`` checks its model and its optimizer, and brings the hooks that say when a step ends and what its gradients are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.rank_metrics import StepMeter


class TrainingWatch(ABC):
    """What ``hvd.watch()`` returns. Recording ends with :meth:`close`, or when the optimizer is watched anew."""

    def __init__(self, model: Any, meter: StepMeter, batch_size: float | None, every: int) -> None:
        self._model = model
        #: Counts the steps of the optimizer; a distributed one has it without a watch, too.
        self._meter = meter
        #: Whether the batch size is the user's, which what trains the model then leaves as it is.
        self.knows_batch_size = batch_size is not None
        #: After how many steps what costs something is recorded; 0 for never.
        self._every = every

    @property
    def batch_size(self) -> float | None:
        """Samples that this rank trains with in a step; ``None`` if that is not known. May be set at any time.

        Raises:
            InvalidRequestError: Set to a number that is not positive and finite.
        """
        return self._meter.batch_size

    @batch_size.setter
    def batch_size(self, samples: float | None) -> None:
        self._meter.batch_size = samples
        self.knows_batch_size = samples is not None

    @property
    def step(self) -> int:
        """Steps that the optimizer has taken. Set it to continue the count of an earlier training."""
        return self._meter.count

    @step.setter
    def step(self, count: int) -> None:
        self._meter.count = count
        self._step_set()

    def _step_set(self) -> None:  # noqa: B027  (nothing depends on it in most frameworks)
        """The user has set the number of steps."""

    @abstractmethod
    def close(self) -> None:
        """Record no more of what only the watch records. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Watch of {type(self._model).__name__}, {self.step} steps>"


def check_every(every: int) -> None:
    """Refuse an ``every=`` of ``watch()`` that is no number of steps.

    Raises:
        InvalidRequestError: It is negative.
    """
    if every < 0:
        raise InvalidRequestError(f"every= is a number of steps, not {every}.")


def record(name: str, value: float, step: int, time_ns: int) -> None:
    """Record a number of a step at a time of the monotonic clock, if there is a world to record it in."""
    if context.is_initialized():
        context.engine().metric(name, value, step, time_ns)

"""Watches of a training that all frameworks share: metrics of its steps, and comparison of the ranks' models.

A framework's ``watch()`` and ``watch_divergence()`` check the model and the optimizer. Their classes bring the hooks by which steps
are counted, and read the framework's tensors.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Never, Self, SupportsFloat, SupportsIndex

from hvdlab.bindings.fingerprints import fingerprint, threads_for
from hvdlab.bindings.objects import allgather_object
from hvdlab.collectives import context
from hvdlab.collectives.engine.telemetry import RankExport
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.collectives.metrics.export import Exporter, checked, patterns
from hvdlab.collectives.metrics.sampler import SAMPLES_PER_SECOND, STEP_TIME
from hvdlab.collectives.process_sets import ProcessSet
from hvdlab.collectives.text import format_ranks, visible

DIVERGENCE_WATCH = "_hvdlab_divergence"
"""The attribute of a model that has its :class:`DivergenceWatch`."""

MOST_SAMPLED = 32
"""Tensors of which a few elements are remembered at each step, at most."""

ELEMENTS = 8
"""Elements that are remembered of each of them."""


class TrainingWatch(ABC):
    """Recording of a training, from ``hvd.watch()``. It ends with :meth:`close`, or when the optimizer is watched again."""

    def __init__(self, model: Any, meter: StepMeter, batch_size: float | None, every: int) -> None:
        self._model = model
        #: Counts the steps of the optimizer; a distributed one has it without a watch, too.
        self._meter = meter
        #: Whether the user has set the batch size, so that the training loop must not change it.
        self.knows_batch_size = batch_size is not None
        #: After how many steps values that cost time are recorded; 0 for never.
        self._every = every

    @property
    def batch_size(self) -> float | None:
        """Return the number of samples that this rank trains with in a step; ``None`` if that is not known. May be set at any time.

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
        """Return the number of steps that the optimizer has taken. Set it to continue the count of an earlier training."""
        return self._meter.count

    @step.setter
    def step(self, count: int) -> None:
        self._meter.count = count
        self._step_set()

    def _step_set(self) -> None:  # noqa: B027  (nothing depends on it in most frameworks)
        """Adapt to a number of steps that the user has set."""

    @abstractmethod
    def close(self) -> None:
        """Stop recording the values that only the watch records. Idempotent."""

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


def record_metric(name: str, value: float, step: int, time_ns: int) -> None:
    """Record a number of a step at a time of the monotonic clock, if there is a world to record it in."""
    if context.is_initialized():
        context.engine().metric(name, value, step, time_ns)


class DivergenceError(HvdlabError):
    """The ranks' models differ. Raised on all ranks, with the same text; nothing was changed.

    Attributes:
        step: Steps that had been taken when it was noticed.
        since: The step after which the models first differed, as far as that is known.
        groups: Ranks whose models are alike, the most numerous first.
        tensors: Names of the tensors that differ.
    """

    def __init__(
        self, step: int, since: int | None, groups: Sequence[tuple[int, ...]], tensors: Sequence[str]
    ) -> None:
        self.step, self.since, self.groups, self.tensors = step, since, tuple(groups), tuple(tensors)
        # With the constructor's own arguments, by which pickle makes the error again in the notebook.
        super().__init__(step, since, self.groups, self.tensors)

    def _text(self) -> str:
        most, *others = self.groups
        if len(most) == 1:
            who = f"all of {format_ranks([rank for group in self.groups for rank in group])} have models of their own"
        else:
            odd = sorted(rank for group in others for rank in group)
            verb = "does" if len(odd) == 1 else "do"
            who = f"{format_ranks(most)} agree and {format_ranks(odd)} {verb} not"
        more = len(self.tensors) - 1
        tensors = (
            f"`{visible(self.tensors[0])}`" + (f" and {more} more" if more else "")
            if self.tensors
            else "its tensors"
        )
        if self.since == 0:
            when = "before the first step; hvd.broadcast_parameters(), with Keras hvd.broadcast_variables(), makes them alike"
        elif self.since is not None:
            when = f"since step {self.since}"
        else:
            when = f"noticed after step {self.step}"
        return f"the ranks' models differ in {tensors}, {when}: {who}. `%hvd_diff` shows by how much."


class DivergenceWatch(ABC):
    """Comparison of the ranks' models, made by ``hvd.watch_divergence()``. It ends with :meth:`close`, or when the model is watched again.

    Attributes:
        step: Steps that were seen.
        checks: How often the whole models were compared.
    """

    def __init__(self, model: Any, every: int, buffers: bool, process_set: ProcessSet) -> None:
        self.step = self.checks = 0
        self._model, self._every, self._buffers, self._set = model, every, buffers, process_set
        self._name = f"divergence.{type(model).__name__}"
        #: Elements of some tensors after each of the last steps, with the number of the step.
        self._samples: deque[tuple[int, list[Any]]] = deque(maxlen=every)

    def check(self) -> None:
        """Compare the models now. All ranks must call it.

        Raises:
            DivergenceError: The models differ; on all ranks. Nothing is changed.
            CollectiveError: Not all ranks called it.
        """
        digests = self._digests()
        whole = fingerprint(*(part for name, digest in digests.items() for part in (name.encode(), digest)))
        alike = self._is_equal_on_all_ranks(whole)
        self.checks += 1
        # Only where the models differ: samples are on the model's device, and to read them waits for it.
        samples = (
            [] if alike else [(step, fingerprint(*map(self._digest, rows))) for step, rows in self._samples]
        )
        self._samples.clear()
        if not alike:
            raise_divergence(self._name, self._set, self.step, digests, samples)

    def close(self) -> None:
        """End the comparisons. Idempotent."""
        self._samples.clear()
        # A later watch of the model stays, also if this one is closed once more.
        if vars(self._model).get(DIVERGENCE_WATCH) is self:
            object.__delattr__(self._model, DIVERGENCE_WATCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<DivergenceWatch of {type(self._model).__name__}, {self.step} steps, {self.checks} comparisons>"
        )

    def _digests(self) -> dict[str, bytes]:
        with ThreadPoolExecutor(threads_for(context.engine().local_size), "hvdlab-fingerprints") as pool:
            return {name: self._digest(tensor, pool) for name, tensor in self._tensors()}

    @abstractmethod
    def _tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the compared tensors, with names that are the same on all ranks."""

    @staticmethod
    @abstractmethod
    def _digest(tensor: Any, pool: ThreadPoolExecutor | None = None) -> bytes:
        """Return the fingerprint of a tensor; a large one is divided among the threads of ``pool``."""

    @abstractmethod
    def _is_equal_on_all_ranks(self, whole: bytes) -> bool:
        """Return whether all ranks passed these ``SIZE`` bytes; a collective of the watch's process set."""


def raise_divergence(
    name: str,
    process_set: ProcessSet,
    step: int,
    digests: Mapping[str, bytes],
    samples: Sequence[tuple[int, bytes]],
) -> Never:
    """Gather the facts for the error's text from all ranks, and raise :class:`DivergenceError`; called by all ranks.

    Args:
        name: Name of the comparison, equal on all ranks.
        process_set: The ranks whose models were compared.
        step: Steps that had been taken.
        digests: Fingerprint of each tensor of the model, by its name.
        samples: Fingerprint of some elements after each of the last steps, with the number of the step.
    """
    rank = context.engine().rank
    gathered = allgather_object((rank, dict(digests), list(samples)), f"{name}.detail", process_set)
    groups: dict[bytes, list[int]] = {}
    for rank, by_name, _ in gathered:
        whole = fingerprint(*(part for label, d in by_name.items() for part in (label.encode(), d)))
        groups.setdefault(whole, []).append(rank)
    all_names = dict.fromkeys(label for _, by_name, _ in gathered for label in by_name)
    odd = [label for label in all_names if len({by_name.get(label) for _, by_name, _ in gathered}) > 1]
    ordered = sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks))
    raise DivergenceError(step, _since([dict(each) for _, _, each in gathered], step), ordered, odd)


def _since(samples: Sequence[dict[int, bytes]], step: int) -> int | None:
    """Return the first step at which the samples differ; 0 if no step was taken, None if no step common to all ranks differs."""
    if step == 0:
        return 0
    common = sorted(set(samples[0]).intersection(*samples[1:]))
    differing = [n for n in common if len({sample[n] for sample in samples}) > 1]
    if not differing:
        return None
    return differing[0]


# -- metrics that the program of a rank reports ------------------------------------------------------------------------


_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def metric(name: str, value: SupportsFloat, step: SupportsIndex | None = None) -> None:
    """Record a number to show over time: a loss, an accuracy, a temperature.

    Any rank may call it, from any thread, at any time; ranks need not agree. It costs about a microsecond and
    nothing waits for it. It is shown with the metrics of all ranks, with the rank and the moment of this call.

    Args:
        name: Its name, such as ``loss`` or ``train/accuracy``; at most 1,024 bytes of it are kept. Names that begin with
            ``hvdlab/`` are those of hvdlab's own metrics.
        value: A number, or a tensor or an array with one element. (One on a GPU is waited for.) NaN and infinities
            are kept as such.
        step: The number of the training step, if it belongs to one.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
        InvalidRequestError: ``name`` is not a text or empty, ``value`` is not one number, or ``step`` not a whole one
            that fits 64 bits.
    """
    engine = context.engine("hvd.metric()")
    if type(value) is not float:
        value = _number(name, value)
    if step is not None and (type(step) is not int or not _LEAST <= step <= _MOST):
        step = _whole_number(name, step)
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"hvd.metric() needs a name, such as 'loss', not {name!r}.")
    engine.metric(name, value, step)


def _number(name: object, value: Any) -> float:
    item = getattr(value, "item", None)  # of tensors and arrays: float() warns of gradients and dimensions
    try:
        return float(value if item is None else item())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shape = getattr(value, "shape", None)
        what = type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        raise InvalidRequestError(
            f"hvd.metric({name!r}) takes one number, or a tensor with one element, not a {what}: {error}"
        ) from None


def _whole_number(name: object, step: Any) -> int:
    number = operator.index(step) if hasattr(step, "__index__") else None
    if number is None or not _LEAST <= number <= _MOST:
        raise InvalidRequestError(
            f"hvd.metric({name!r}): step= is a whole number of at most 64 bits, not {step!r} ({type(step).__name__})."
        )
    return number


class StepMeter:
    """Meter of the time from the end of each step to the end of the next.

    A step that ended in another cell or another world than the next does not count: between them the user was thinking.

    Attributes:
        count: Steps so far; set it to go on where an earlier training ended.
    """

    def __init__(self) -> None:
        self.count = 0
        self._batch_size: float | None = None
        #: When the last step ended, with the world and the cell in which it did; ``None`` if the next one is
        #: not to be measured.
        self._before: tuple[int, object] | None = None

    @property
    def batch_size(self) -> float | None:
        """Return the number of samples that this rank trains with in a step; ``None`` if that is not known."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, samples: float | None) -> None:
        if samples is not None and not 0 < samples < float("inf"):
            raise InvalidRequestError(f"batch_size= is the number of samples in a step, not {samples!r}.")
        self._batch_size = samples

    def pause(self) -> None:
        """Exclude the time from now until the end of the next step: it does not count as the time of a step."""
        self._before = None

    def step(self, steps: int = 1) -> None:
        """Record that a step has ended now; or several whose ends can't be distinguished: then each counts as its part of the time."""
        now = time.monotonic_ns()
        self.count += steps
        if not context.is_initialized():
            self._before = None
            return
        engine = context.engine()
        where = (id(engine), engine.cells_begun)
        if self._before is not None and self._before[1] == where:
            # At least a nanosecond: the clock has perhaps not moved, and the rate below divides by this.
            seconds = max(now - self._before[0], 1) / 1e9 / steps
            engine.metric(STEP_TIME, seconds, self.count, now)
            if self._batch_size is not None:
                engine.metric(SAMPLES_PER_SECOND, self._batch_size / seconds, self.count, now)
        self._before = now, where


def export(exporter: Exporter, names: str | Sequence[str] = "*", *, all_ranks: bool = False) -> RankExport:
    """Hand metrics to a tracker from now on: those of ``hvd.metric()``, and hvdlab's own.

    They reach it a moment after they were recorded, on a thread of its own: a tracker that is slow or away does not hold up the
    training. Once 100,000 points wait, the oldest are dropped, and counted. Exporting to the same place again replaces the
    export before, so a cell may be run twice.

    Args:
        exporter: One of :mod:`hvdlab.exporters`, or any object with ``write(points)`` and ``close()``, see
            :class:`hvdlab.collectives.metrics.export.Exporter`.
        names: Patterns of the metrics to export, such as ``["loss*", "hvdlab/step_time"]``.
        all_ranks: Also hand over the other ranks' metrics. Then call it on one rank.

    Returns:
        The export, with ``exported``, ``dropped`` and ``failed`` counts. ``close()`` ends it, and so does ``hvd.shutdown()``
        or the end of the program.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
        InvalidRequestError: ``exporter`` lacks one of the methods.
    """
    engine = context.engine("hvd.export()")
    checked(exporter)
    return engine.exports.add(exporter, patterns(names), all_ranks)

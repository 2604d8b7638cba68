"""The last steps of a training, kept until they are needed, for any framework: ``hvd.record()`` returns such a record.

A step's record is a fingerprint of its inputs, its loss and the norm of its gradients, and as long as there is
room the batch itself. It is shown with an error, and ``%hvd_replay`` brings a batch to the notebook. A framework brings
its sample of a tensor (:class:`Sample`), the state of its random numbers, and the hooks that call
:meth:`StepRecord.begin` and the like.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.text import visible

MEMORY = 256 << 20
"""Bytes of batches that are kept."""

SAMPLED = 4096
"""Elements of an input that its fingerprint is made of."""

SHOWN = 3
"""Steps that are shown with an error, besides the first that is not finite."""

DEEPEST = 4
"""Levels of mappings and sequences in which a batch is searched for tensors."""
LONGEST_PATH = 120
"""Characters that are shown of an input's path, which is made of keys of the batch."""

# Weakly, so that a record ends with the model whose hooks refer to it.
_records: weakref.WeakSet[StepRecord] = weakref.WeakSet()
_records_lock = threading.Lock()


class Sample(Protocol):
    """Some elements of a tensor. They are read only when they are shown."""

    @property
    def finite(self) -> bool:
        """Return whether all elements are, also those that are not kept."""
        ...

    def digest(self) -> bytes:
        """Return a fingerprint of the elements that are kept."""
        ...


class RandomState(Protocol):
    """The state of a framework's random numbers before a step."""

    def restored(self, model: Any) -> AbstractContextManager[object]:
        """Return a context in which a call of ``model`` gets the same random numbers; afterwards they continue as before."""
        ...


@dataclass(slots=True)
class Input:
    """Tensor among a step's inputs; ``kind`` is its type and shape, as in ``float32[8, 4]``."""

    path: str
    kind: str
    sample: Sample

    def __str__(self) -> str:
        odd = "" if self.sample.finite else " NOT FINITE"
        return f"{visible(self.path, LONGEST_PATH)} {self.kind} #{self.sample.digest().hex()[:6]}{odd}"


@dataclass(slots=True)
class Step:
    """Step of a training, as the record keeps it.

    Attributes:
        number: From 1 on, since the record was made.
        began: When it began, by ``time.monotonic_ns()``.
        inputs: Samples of its tensors.
        batch: ``(args, kwargs)`` of the model's call, if it is kept.
        nbytes: Bytes of the batch.
        generator: The state of the random numbers before it.
        loss, norm: Its loss and the norm of its gradients, as numbers or objects that ``float`` accepts.
    """

    number: int
    began: int
    inputs: Sequence[Input]
    batch: tuple[tuple[Any, ...], dict[str, Any]] | None
    nbytes: int
    generator: RandomState
    loss: Any = None
    norm: Any = None

    @property
    def wrong(self) -> str:
        """Return the first thing about it that is not finite: ``inputs``, ``loss`` or ``gradients``; empty if all is."""
        if not all(one.sample.finite for one in self.inputs):
            return "inputs"
        for value, name in ((self.loss, "loss"), (self.norm, "gradients")):
            if value is not None and not math.isfinite(float(value)):
                return name
        return ""

    def __str__(self) -> str:
        parts = [f"step {self.number}"]
        for value, name in ((self.loss, "loss"), (self.norm, "gradient norm")):
            if value is not None:
                parts.append(f"{name} {float(value):.6g}")
        return "  ".join([*parts, *map(str, self.inputs)])


@dataclass(slots=True)
class Replay:
    """A recorded step as another process gets it, such as the notebook.

    Attributes:
        rank, step: The rank that recorded it, and its number.
        args, kwargs: The arguments of the model's call.
        loss, gradient_norm: As recorded; None if they were not.
        generator: State of the random numbers before the call.
        text: All of it in one line.
    """

    rank: int
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: float | None
    gradient_norm: float | None
    generator: RandomState = field(repr=False)
    text: str = field(repr=False, default="")

    def run(self, model: Any) -> Any:
        """Call ``model`` as it was called then, with the same random numbers (of the CPU). Returns its result."""
        with self.generator.restored(model):
            return model(*self.args, **self.kwargs)


class StepRecord:
    """Record of a model's steps, from ``hvd.record()``. It ends with :meth:`close`, or when the model is recorded again.

    Args:
        last: How many steps are kept.
        memory: Bytes of batches that are kept.

    Attributes:
        steps: The last ones, oldest first.
        replay_type: The class of :meth:`replay`'s result.
    """

    replay_type: ClassVar[type[Replay]] = Replay

    def __init__(self, last: int, memory: int) -> None:
        if last < 1:
            raise InvalidRequestError(f"last= is a number of steps from 1, not {last}.")
        self.steps: deque[Step] = deque(maxlen=last)
        #: Bytes for batches, and the number of the last step.
        self._memory, self._count = memory, 0
        #: Frameworks may call from threads of their own.
        self._lock = threading.Lock()
        with _records_lock:
            _records.add(self)

    # -- while training -----------------------------------------------------------------------------------------------

    def begin(
        self,
        inputs: Sequence[Input],
        batch: tuple[tuple[Any, ...], dict[str, Any]],
        nbytes: int,
        generator: RandomState,
    ) -> None:
        """Begin a step. Its batch is kept as far as memory permits; batches of older steps are dropped for it."""
        with self._lock:
            self._count += 1
            self.steps.append(Step(self._count, time.monotonic_ns(), inputs, batch, nbytes, generator))
            room = self._memory
            for step in reversed(self.steps):
                room -= step.nbytes
                if room < 0:
                    # Batches are dropped from the oldest on, so all before this one are gone.
                    if step.batch is None:
                        break
                    step.batch = None

    def set_loss(self, value: Any) -> None:
        """Record the loss of the running step."""
        with self._lock:
            if self.steps:
                self.steps[-1].loss = value

    def set_norm(self, value: Any) -> None:
        """Record the norm of the running step's gradients."""
        with self._lock:
            if self.steps:
                self.steps[-1].norm = value

    def close(self) -> None:
        """End it and forget its record. Idempotent."""
        with self._lock:
            self.steps.clear()
        with _records_lock:
            _records.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- afterwards ---------------------------------------------------------------------------------------------------

    @property
    def first_wrong(self) -> Step | None:
        """Return the first step with a value that is not finite, unless all later values were finite again."""
        found = None
        for step in reversed(self._all()):
            if step.wrong:
                found = step
            elif (
                step.loss is not None or step.norm is not None
            ):  # a finite one that got as far as a loss or a norm
                break
        return found

    def _all(self) -> list[Step]:
        with self._lock:
            # A copy: to put steps into words waits for a GPU, and the training must not wait for this lock
            # meanwhile.
            return list(self.steps)

    def lines(self) -> list[str]:
        """Return the last steps, and the first that is not finite, a line each."""
        wrong, last = self.first_wrong, self._all()[-SHOWN:]
        if wrong is None:
            return [str(step) for step in last]
        mark = f"{wrong}   <- the first that is not finite: {wrong.wrong}"
        if not any(step is wrong for step in last):
            return [mark, "...", *map(str, last)]
        return [mark if step is wrong else str(step) for step in last]

    def replay(self, step: int | None = None) -> Replay:
        """Return a recorded step, for another process.

        Args:
            step: Its number; by default the first step that is not finite, or, without one, the last.

        Raises:
            LookupError: The step or its batch is not kept.
        """
        steps = self._all()
        if step is None:
            found = self.first_wrong or (steps[-1] if steps else None)
        else:
            found = next((one for one in steps if one.number == step), None)
        if found is None:
            kept = f"steps {steps[0].number} to {steps[-1].number} are" if steps else "no step is"
            raise LookupError(f"step {step} is not kept; {kept}" if step is not None else f"{kept} kept")
        if found.batch is None:
            raise LookupError(
                f"the batch of step {found.number} is not kept; `memory=` of hvd.record() is too small"
            )
        rank = context.engine().rank if context.is_initialized() else 0
        loss, norm = (None if value is None else float(value) for value in (found.loss, found.norm))
        return self.replay_type(rank, found.number, *found.batch, loss, norm, found.generator, str(found))

    def __repr__(self) -> str:
        steps = self._all()
        return "\n".join([f"<Record of {self._count} steps, {len(steps)} kept>", *map(str, steps)])


def tensors(
    value: Any, is_tensor: Callable[[Any], bool], path: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a batch, also in mappings and sequences of it, each with the path to it."""
    if is_tensor(value):
        yield path or "input", value
    elif depth < DEEPEST and isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, is_tensor, f"{path}.{key}".lstrip("."), depth + 1)
    elif depth < DEEPEST and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, item in enumerate(value):
            yield from tensors(item, is_tensor, f"{path}[{number}]", depth + 1)


# -- for the notebook's side --------------------------------------------------------------------------------------


def newest() -> StepRecord | None:
    """Return the record on this rank that has recorded a step last; ``None`` if there is none with steps."""
    with _records_lock:
        # A copy: no record is asked for its steps, under its own lock, while this one is held.
        records = list(_records)
    # Once for each record: another thread may close it while this one compares.
    last = [(one, steps[-1]) for one in records if (steps := one._all())]
    return max(last, key=lambda pair: pair[1].began)[0] if last else None


def recent() -> tuple[tuple[str, ...], str]:
    """Return the lines to be shown with an error, and the one about the first step that is not finite."""
    found = newest()
    if found is None:
        return (), ""
    wrong = found.first_wrong
    return tuple(found.lines()), "" if wrong is None else str(wrong)


def suspects() -> tuple[int, int, str] | None:
    """Return the facts from which ``%hvd_replay`` chooses a rank; ``None`` if nothing was recorded.

    Returns:
        The number of the first step that is not finite (a huge number if all are finite); 0 to 2 for inputs, loss or
        gradients (3 if all are finite); and that step, or, without one, the last, as text.
    """
    found = newest()
    if found is None:
        return None
    wrong, steps = found.first_wrong, found._all()
    if wrong is None:
        # None are left where another thread has closed the record meanwhile.
        return (1 << 60, 3, str(steps[-1])) if steps else None
    return (wrong.number, ("inputs", "loss", "gradients").index(wrong.wrong), str(wrong))


def replay(step: int | None = None) -> Replay:
    """Return :meth:`StepRecord.replay` of the :func:`newest` record. Raises ``LookupError`` if there is none."""
    found = newest()
    if found is None:
        raise LookupError("nothing was recorded; hvd.record(model) before the training does")
    return found.replay(step)

"""``hvd.watch_divergence()`` for models of Keras: raises an error when the ranks' models are no longer the same."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from hvdlab.bindings.divergence import DivergenceError, tell_divergence
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.fingerprint import SIZE, fingerprint, of_blocks, threads_for
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.fits import ATTRIBUTE_OF_WATCH, record_fits
from hvdlab.tensorflow.keras.models import package_of
from hvdlab.tensorflow.ops import allgather

__all__ = ["DivergenceError", "DivergenceWatch", "watch_divergence"]

MOST_SAMPLED = 32
"""Variables of which a few elements are remembered at each step, at most."""

ELEMENTS = 8
"""Elements that are remembered of each of them."""
_NUMBERS = re.compile(r"_\d+(?=/|:|$)")


class DivergenceWatch:
    """What :func:`watch_divergence` returns. The comparisons end with :meth:`close`, or when the model is watched anew.

    Attributes:
        step: Steps that were seen.
        checks: How often the whole models were compared.
    """

    def __init__(self, model: Any, every: int, buffers: bool, process_set: ProcessSet) -> None:
        self.step = self.checks = 0
        self._model, self._every, self._buffers, self._set = model, every, buffers, process_set
        self._name = f"divergence.{type(model).__name__}"
        self._samples: deque[tuple[int, list[Any]]] = deque(maxlen=every)
        #: A ``tf.function`` that reads some elements of some variables; made after the first step, when the model has its variables.
        self._sampled: Any = None

    def step_ended(self, steps: int = 1) -> None:
        """Count a step, or several, and compare the models if it is time. ``fit`` calls it itself; a loop of your own must.

        Args:
            steps: How many steps have ended since the last call.

        Raises:
            DivergenceError: The models were compared, and differ; on all ranks. Nothing is changed.
            CollectiveError: The models could not be compared, since not all ranks came to this step.
        """
        before, self.step = self.step, self.step + steps
        if self._every > 1:
            if self._sampled is None:
                self._sampled = tf.function(self._sample, autograph=False)
            self._samples.append((self.step, self._sampled()))
        if before // self._every != self.step // self._every:
            self.check()

    def check(self) -> None:
        """Compare the models now. All ranks must call it.

        Raises:
            DivergenceError: The models differ; on all ranks. Nothing is changed.
            CollectiveError: Not all ranks called it.
        """
        digests = self._digests()
        whole = fingerprint(*(part for name, d in digests.items() for part in (name.encode(), d)))
        mine = np.frombuffer(whole, np.uint8).reshape(1, SIZE)
        gathered = allgather(mine, self._name, process_set=self._set).numpy()
        self.checks += 1
        samples = [(step, fingerprint(*map(_of_array, rows))) for step, rows in self._samples]
        self._samples.clear()
        if not (gathered == gathered[0]).all():
            tell_divergence(self._name, self._set, self.step, digests, samples)

    def close(self) -> None:
        """End the comparisons. Idempotent."""
        self._samples.clear()
        self._sampled = None
        if vars(self._model).get(ATTRIBUTE_OF_WATCH) is self:
            object.__delattr__(self._model, ATTRIBUTE_OF_WATCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<DivergenceWatch of {type(self._model).__name__}, {self.step} steps, {self.checks} comparisons>"
        )

    def _variables(self) -> Sequence[Any]:
        return self._model.weights if self._buffers else self._model.trainable_weights  # type: ignore[no-any-return]

    def _digests(self) -> dict[str, bytes]:
        found = {}
        with ThreadPoolExecutor(threads_for(context.engine().local_size), "hvdlab-fingerprints") as pool:
            for number, variable in enumerate(self._variables()):
                # Keras numbers the names within each process, so a rank that has made another model before has other numbers.
                label = _NUMBERS.sub("", getattr(variable, "path", None) or variable.name)
                found[f"[{number}] {label}"] = _of_array(plain_variable(variable), pool)
        return found

    def _sample(self) -> list[Any]:
        variables = [plain_variable(each) for each in self._variables()]
        step = max(1, -(-len(variables) // MOST_SAMPLED))
        return [tf.reshape(each, [-1])[:ELEMENTS] for each in variables[::step]]


def _of_array(tensor: Any, pool: ThreadPoolExecutor | None = None) -> bytes:
    array = np.ascontiguousarray(tensor.numpy())
    raw = array.reshape(-1).view(np.uint8)
    head = f"{array.dtype} {array.shape}".encode()
    return fingerprint(head, of_blocks(raw.size, lambda at, length: raw[at : at + length], pool=pool))


def watch_divergence(
    model: Any,
    every: int = 100,
    *,
    buffers: bool = False,
    process_set: ProcessSet = global_process_set,
) -> DivergenceWatch:
    """Raise :class:`DivergenceError` on all ranks when their copies of a model are no longer the same, bit by bit.

    The ranks compare fingerprints of their models after every ``every`` steps. In between each rank remembers a few elements of its
    model at each step, so that the error can name the step after which the models first differed. ``model.fit`` counts its steps
    itself; in a loop of your own, call the watch's ``step_ended()`` after each step. Calling it again for a model replaces the
    earlier watch, so a cell may be run twice.

    Args:
        model: A model of Keras 3 or of Keras 2, trained alike on all ranks.
        every: After how many steps the models are compared. A comparison reads all trainable weights once.
        buffers: Whether to compare the other weights, too. Running statistics of batch normalization differ from rank to rank by
            nature.
        process_set: The ranks that train together; all by default.

    Returns:
        The watch, which ``close()`` ends; it can be used as a context manager.

    Raises:
        InvalidRequestError: ``model`` is no model of Keras, or ``every`` is less than 1.
    """
    package = package_of(model)
    if package is None:
        raise InvalidRequestError(
            f"hvd.watch_divergence() takes a model of Keras, not a {type(model).__name__}."
        )
    if every < 1:
        raise InvalidRequestError(f"every= is a number of steps from 1, not {every}.")
    record_fits(sys.modules[package])
    before: DivergenceWatch | None = vars(model).get(ATTRIBUTE_OF_WATCH)
    if before is not None:
        before.close()
    made = DivergenceWatch(model, every, buffers, process_set)
    object.__setattr__(model, ATTRIBUTE_OF_WATCH, made)
    return made

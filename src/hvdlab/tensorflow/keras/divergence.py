"""``hvd.watch_divergence()`` for models of Keras: raises an error when the ranks' models are no longer the same."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdlab.bindings.monitoring import DIVERGENCE_WATCH, ELEMENTS, MOST_SAMPLED, DivergenceWatch
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.fingerprint import SIZE, fingerprint, of_blocks
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.fits import record_fits
from hvdlab.tensorflow.keras.models import package_of
from hvdlab.tensorflow.ops import allgather

_NUMBERS = re.compile(r"_\d+(?=/|:|$)")


class KerasDivergenceWatch(DivergenceWatch):
    """Comparison of the ranks' models, made by :func:`watch_divergence`."""

    def __init__(self, model: Any, every: int, buffers: bool, process_set: ProcessSet) -> None:
        super().__init__(model, every, buffers, process_set)
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

    def close(self) -> None:
        """End the comparisons. Idempotent."""
        super().close()
        self._sampled = None

    def _variables(self) -> Sequence[Any]:
        return self._model.weights if self._buffers else self._model.trainable_weights  # type: ignore[no-any-return]

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        for number, variable in enumerate(self._variables()):
            # Keras numbers the names within each process, so a rank that has made another model before has other numbers.
            label = _NUMBERS.sub("", getattr(variable, "path", None) or variable.name)
            yield f"[{number}] {label}", plain_variable(variable)

    @staticmethod
    def _digest(tensor: Any, pool: ThreadPoolExecutor | None = None) -> bytes:
        array = np.ascontiguousarray(tensor.numpy())
        raw = array.reshape(-1).view(np.uint8)
        head = f"{array.dtype} {array.shape}".encode()
        return fingerprint(head, of_blocks(raw.size, lambda at, length: raw[at : at + length], pool=pool))

    def _is_equal_on_all_ranks(self, whole: bytes) -> bool:
        mine = np.frombuffer(whole, np.uint8).reshape(1, SIZE)
        gathered = allgather(mine, self._name, process_set=self._set).numpy()
        return bool((gathered == gathered[0]).all())

    def _sample(self) -> list[Any]:
        variables = [plain_variable(each) for each in self._variables()]
        step = max(1, -(-len(variables) // MOST_SAMPLED))
        return [tf.reshape(each, [-1])[:ELEMENTS] for each in variables[::step]]


def watch_divergence(
    model: Any,
    every: int = 100,
    *,
    buffers: bool = False,
    process_set: ProcessSet = global_process_set,
) -> KerasDivergenceWatch:
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
    before: KerasDivergenceWatch | None = vars(model).get(DIVERGENCE_WATCH)
    if before is not None:
        before.close()
    made = KerasDivergenceWatch(model, every, buffers, process_set)
    object.__setattr__(model, DIVERGENCE_WATCH, made)
    return made

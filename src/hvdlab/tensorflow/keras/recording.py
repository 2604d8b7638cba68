"""``hvd.record()`` for models of Keras and for loops of your own: keeps the last steps, so that an error can show its step and batch.

In a graph, a ``py_function`` takes a step's tensors to the record. It gets TensorFlow's own tensors, which nothing changes later, so
that no copy is needed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlab.bindings.step_record import MEMORY, SAMPLED, Input, Replay, StepRecord, tensors
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.fingerprint import fingerprint
from hvdlab.tensorflow.failures import translated
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.graph import refuse_compilation
from hvdlab.tensorflow.installed import internal, tf
from hvdlab.tensorflow.keras.models import package_of
from hvdlab.tensorflow.keras.optimizers import loss_scale, reducer_of
from hvdlab.tensorflow.reduction import GradientReducer

_ATTRIBUTE = "_hvdlab_record"
_SEED = "seed_generator_state"
"""The end of Keras 3's path of a variable with the state of a layer's random numbers."""

_COMPILED = (
    "hvd.record() can't look into steps that XLA compiles: use model.compile(..., jit_compile=False), and in a loop of your "
    "own tf.function without jit_compile=True."
)


@dataclass(frozen=True, slots=True)
class ArraySample:
    """Some elements of a tensor, copied, and whether all of them are finite."""

    elements: np.ndarray[Any, Any]
    finite: bool

    def digest(self) -> bytes:
        return fingerprint(str(self.elements.dtype).encode(), self.elements.tobytes())


@dataclass(frozen=True, slots=True)
class SeedStates:
    """The states of the random numbers of a model's layers. Keras 3 has them in variables; for Keras 2 there are none."""

    states: Any

    @contextmanager
    def restored(self, model: Any) -> Iterator[None]:
        """In this context the layers of ``model``, one like the recorded model, have these states; afterwards their former ones."""
        variables = _seeds(model) if len(self.states) else []
        before = [variable.numpy() for variable in variables]
        for variable, state in zip(variables, np.asarray(self.states), strict=True):
            variable.assign(state)
        try:
            yield
        finally:
            for variable, state in zip(variables, before, strict=True):
                variable.assign(state)


class KerasReplay(Replay):
    """A recorded step of a model of Keras; ``args`` has the inputs, then targets and sample weights, if there were any."""

    __slots__ = ()

    def run(self, model: Any) -> Any:
        """Call ``model`` on the inputs, in training mode, with the same random numbers as then (Keras 3). Returns the outputs."""
        with self.generator.restored(model):
            return model(self.args[0], training=True)


class KerasRecord(StepRecord):
    """What :func:`record` returns. Recording ends with :meth:`close`, or when the model is recorded anew.

    Attributes:
        steps: The last steps, the oldest first.
    """

    replay_type = KerasReplay

    def __init__(self, model: Any, last: int, memory: int) -> None:
        super().__init__(last, memory)
        self._model = model
        #: Whether :meth:`close` was called: functions that were traced with this record go on calling it.
        self._closed = False
        #: Whether the model's ``train_step`` runs, so that a loss that is computed now is that of a training step.
        self._in_step = False
        if model is not None:
            self._attach(model)

    # -- what a step reports ------------------------------------------------------------------------------------------

    @translated
    def batch(self, *args: Any, **kwargs: Any) -> None:
        """Begin a step with these inputs. ``fit`` calls it for a model that was given to :func:`record`.

        Args:
            args, kwargs: The inputs, targets and so on. Tensors are found in nested lists, tuples and mappings, too.
        """
        seeds = [variable.value for variable in _seeds(self._model)]
        states = tf.stack(seeds) if seeds else ()
        self._call("_begin", [args, kwargs, states])

    @translated
    def loss(self, value: Any) -> None:
        """Set the loss of the step that runs: a number, or a tensor, whose mean counts."""
        self._call("set_loss", [tf.reduce_mean(tf.cast(value, tf.float32))])

    @translated
    def gradients(self, gradients: Sequence[Any], scale: Any = None) -> None:
        """Keep the norm of the gradients of the step that runs.

        Args:
            gradients: Tensors, ``tf.IndexedSlices`` or ``None``.
            scale: The loss scale, by which the norm is divided; ``None`` without loss scaling.
        """
        wide = [tf.cast(each, tf.float32) for each in _values(gradients)]
        if wide:
            norm = tf.linalg.global_norm(wide)
            self._call("set_norm", [norm if scale is None else norm / tf.cast(scale, tf.float32)])

    def _call(self, method: str, values: list[Any]) -> None:
        """Call a method with these values; in a graph, make an operation that calls it whenever the graph is executed."""
        if tf.executing_eagerly():
            getattr(self, method)(*values)
            return
        refuse_compilation(_COMPILED)
        flat = tf.nest.flatten(values, expand_composites=True)
        places = [place for place, each in enumerate(flat) if tf.is_tensor(each)]
        others = [None if tf.is_tensor(each) else each for each in flat]
        structure = tf.nest.map_structure(_placeholder, values)
        # TensorFlow keeps the function of a py_function for ever, so the function must not keep the record, or the graph.
        reference = weakref.ref(self)

        def run(*given: Any) -> None:
            record = reference()
            if record is not None and not record._closed:
                whole = list(others)
                for place, tensor in zip(places, given, strict=True):
                    whole[place] = tensor
                getattr(record, method)(*tf.nest.pack_sequence_as(structure, whole, expand_composites=True))

        tf.py_function(run, [flat[place] for place in places], [], name="hvdlab_record")

    def _begin(self, args: Any, kwargs: Any, states: Any) -> None:
        args, kwargs = tf.nest.map_structure(_kept, (args, kwargs))
        found = [*tensors(args, tf.is_tensor), *tensors(kwargs, tf.is_tensor)]
        inputs = [_input(path, tensor) for path, tensor in found]
        nbytes = sum(_nbytes(tensor) for _, tensor in found)
        seeds = np.asarray(states) if len(states) else ()
        self.begin(inputs, (tuple(args), dict(kwargs)), nbytes, SeedStates(seeds))

    # -- the model ----------------------------------------------------------------------------------------------------

    def _attach(self, model: Any) -> None:
        _replace(model, "train_step", self._recorded_step(model))
        _replace(model, "compute_loss", self._recorded_loss(model.compute_loss))
        _replace(model, _ATTRIBUTE, self)
        model.train_function = None  # so that Keras traces the step anew

    def _recorded_step(self, model: Any) -> Any:
        original = model.train_step

        @functools.wraps(original)
        def train_step(data: Any) -> Any:
            if getattr(model, "jit_compile", None) is True:
                raise UnsupportedError(_COMPILED)
            begun: list[Any] = []
            if tf.executing_eagerly():
                self.batch(*_parts(data))
            else:
                graph = tf.compat.v1.get_default_graph()
                before = len(graph.get_operations())
                self.batch(*_parts(data))
                begun = graph.get_operations()[before:]
            self._in_step = True
            try:
                with tf.control_dependencies(begun), self._observed(model.optimizer):
                    return _as_rewritten(original)(data)
            finally:
                self._in_step = False

        return _not_rewritten(train_step)

    def _recorded_loss(self, original: Any) -> Any:
        @functools.wraps(original)
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = _as_rewritten(original)(*args, **kwargs)
            if self._in_step and loss is not None:
                self.loss(loss)
            return loss

        return _not_rewritten(compute_loss)

    def _observed(self, optimizer: Any) -> AbstractContextManager[None]:
        """In this context, record the norm of this rank's own gradients when the optimizer's reducer gets them."""

        def observe(gradients: Sequence[Any]) -> None:
            self.gradients(gradients, loss_scale(optimizer))

        return _observing(reducer_of(optimizer), observe)

    def close(self) -> None:
        """Stop recording and forget what was recorded. Idempotent."""
        self._closed = True
        super().close()
        model, self._model = self._model, None
        if model is not None and vars(model).get(_ATTRIBUTE) is self:
            for name in ("train_step", "compute_loss", _ATTRIBUTE):
                object.__delattr__(model, name)
            model.train_function = None


def record(
    model: Any = None,
    optimizer: Any = None,
    *,
    last: int = 50,
    memory: int = MEMORY,
) -> KerasRecord:
    """Keep the inputs, loss and norm of the gradients of the last steps on this rank, to show them with errors and replay them.

    Of each step of ``model.fit`` or ``train_on_batch`` the record keeps the inputs and targets, the loss that
    ``model.compute_loss`` returns, and, if the optimizer is distributed, the norm of this rank's own gradients before they are
    reduced. In a loop of your own, call the record's ``batch(x, y)``, ``loss(loss)`` and ``gradients(gradients)``, also within a
    ``tf.function``. Calling it again for a model replaces the earlier record.

    Args:
        model: A model of Keras 3 or of Keras 2; ``None`` for a loop of your own.
        optimizer: Not used: the model's own optimizer counts.
        last: How many steps are kept.
        memory: Bytes of batches that are kept, 256 MiB by default; of steps before them only the fingerprints remain.

    Returns:
        The record, which ``close()`` ends; it can be used as a context manager.

    Raises:
        InvalidRequestError: ``model`` is no model of Keras, or ``last`` is less than 1.
        UnsupportedError: XLA compiles the model's steps.
    """
    if model is not None and package_of(model) is None:
        raise InvalidRequestError(f"model= of hvd.record() is no {type(model).__name__}.")
    if model is not None:
        if getattr(model, "jit_compile", None) is True:
            raise UnsupportedError(_COMPILED)
        before: KerasRecord | None = vars(model).get(_ATTRIBUTE)
        if before is not None:
            before.close()
    return KerasRecord(model, last, memory)


def _not_rewritten(function: Any) -> Any:
    """Mark a function so that AutoGraph does not rewrite it, but still rewrites the functions that it calls."""
    return internal("autograph.impl.api").autograph_artifact(function)


def _as_rewritten(function: Any) -> Any:
    """A function of the user's, rewritten by AutoGraph if AutoGraph would have rewritten it without hvdlab."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def _placeholder(value: Any) -> Any:
    """A value's placeholder in a structure: for a sparse or ragged tensor, which has several tensors, its type; else ``None``."""
    return tf.type_spec_from_value(value) if isinstance(value, tf.__internal__.CompositeTensor) else None


def _replace(model: Any, name: str, value: Any) -> None:
    """Assign an attribute past Keras, which would take it for a part of the model that it has to track."""
    object.__setattr__(model, name, value)


@contextmanager
def _observing(reducer: GradientReducer | None, observer: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    if reducer is None:
        yield
        return
    before, reducer.observer = reducer.observer, observer
    try:
        yield
    finally:
        reducer.observer = before


def _parts(data: Any) -> tuple[Any, ...]:
    """The inputs, targets and sample weights that ``fit`` passes to a step, as far as there are any."""
    if not isinstance(data, tuple):
        return (data,)
    parts = list(data)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    return tuple(parts)


def _seeds(model: Any) -> list[Any]:
    if not getattr(model, "built", False):
        return []  # Keras 2 raises an error for its variables then
    return [variable for variable in model.variables if getattr(variable, "path", "").endswith(_SEED)]


def _kept(value: Any) -> Any:
    """The value in a form that nothing changes later: a variable or an array is copied to a tensor."""
    plain = plain_variable(value)
    return tf.convert_to_tensor(plain) if isinstance(plain, np.ndarray | tf.Variable) else plain


def _values(gradients: Sequence[Any]) -> list[Any]:
    return [
        each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None
    ]


def _dense(tensor: Any) -> Any:
    """The elements of a tensor, also of a sparse or ragged one."""
    return tensor if isinstance(tensor, tf.Tensor) else tf.nest.flatten(tensor, expand_composites=True)[0]


def _nbytes(tensor: Any) -> int:
    return sum(
        int(part.shape.num_elements() or 0) * part.dtype.size
        for part in tf.nest.flatten(tensor, expand_composites=True)
    )


def _input(path: str, tensor: Any) -> Input:
    kind = f"{tensor.dtype.name}{[-1 if size is None else size for size in tensor.shape]}"
    elements = _dense(tensor)
    if not (elements.dtype.is_floating or elements.dtype.is_integer or elements.dtype.is_bool):
        return Input(path, kind, ArraySample(np.empty(0), True))
    array = np.asarray(elements)
    finite = True
    if elements.dtype.is_floating and array.size:
        finite = bool(np.isfinite(array.min()) and np.isfinite(array.max()))
    flat = np.ravel(array)
    return Input(path, kind, ArraySample(flat[:: max(1, flat.size // SAMPLED)].copy(), finite))

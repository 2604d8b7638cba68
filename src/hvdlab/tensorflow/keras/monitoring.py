"""``hvd.watch()``, ``hvd.record()`` and ``hvd.watch_divergence()`` for models and optimizers of Keras.

A watch records metrics of a training. A watched optimizer computes the norm of its gradients when it applies them, within the
function that Keras has traced for a step, and leaves it in a variable. Another variable has whether the next step has to compute it.

A record keeps the last steps, so that an error can show its step and batch, also in a loop of your own. In a graph, a
``py_function`` passes a step's tensors to the record. It gets TensorFlow's own tensors, which nothing changes later, so that no copy
is needed.

A divergence watch raises an error when the ranks' models are no longer the same.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from hvdlab.bindings.fingerprints import SIZE, fingerprint, of_blocks
from hvdlab.bindings.monitoring import (
    DIVERGENCE_WATCH,
    ELEMENTS,
    MOST_SAMPLED,
    DivergenceWatch,
    StepMeter,
    TrainingWatch,
    check_every,
    record_metric,
)
from hvdlab.bindings.step_record import MEMORY, SAMPLED, Input, Replay, StepRecord, tensors
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.metrics.sampler import GRADIENT_NORM, LEARNING_RATE, LOSS_SCALE
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.tensorflow.errors import translated
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.gradient_tape import TensorFlowReducer
from hvdlab.tensorflow.graph_ops import refuse_compilation
from hvdlab.tensorflow.installed import internal, tf
from hvdlab.tensorflow.keras.callbacks import learning_rate
from hvdlab.tensorflow.keras.fit_hooks import record_fits
from hvdlab.tensorflow.keras.optimizers import (
    Distributed,
    is_keras_optimizer,
    loss_scale,
    package_of,
    package_of_optimizer,
    reducer_of,
    without_scaling,
)
from hvdlab.tensorflow.mpi_ops import allgather

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
        AbortedError: Raised by the step after which the models are compared, if a rank fails before it has compared. After a
            failed comparison the model is as the step left it.
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


_NOTHING = -1.0
"""The value of the norm's variable until a norm has been computed."""


class KerasWatch(TrainingWatch):
    """Recording of a training, from :func:`watch`. It ends with :meth:`close`, or when the optimizer is watched again."""

    def __init__(self, model: Any, optimizer: Any, batch_size: float | None, every: int) -> None:
        self._optimizer, self._inner = optimizer, without_scaling(optimizer)
        meter = getattr(self._inner, "hvdlab_meter", None) or StepMeter()
        super().__init__(model, meter, batch_size, every)
        if batch_size is not None:
            self._meter.batch_size = batch_size
        #: Whether the next step computes the norm, as in the variable ``_due``, which traced functions read.
        self._measuring = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._due = tf.Variable(False, trainable=False, name="hvdlab_watch_due")
            self._norm = tf.Variable(_NOTHING, trainable=False, name="hvdlab_watch_norm")
        #: The loss scale before the next step; ``None`` without loss scaling.
        self._scale: float | None = None
        kind: Any = type(self._inner)
        self._plain_class = kind
        # By its class: the model and the loss scaling around the optimizer refer to this very object.
        self._inner.__class__ = _watched_class(kind)
        for name, value in (("hvdlab_watch", self), ("hvdlab_meter", self._meter)):
            object.__setattr__(self._inner, name, value)  # past Keras, which would track them
        if hasattr(model, "train_function"):
            model.train_function = None  # so that Keras traces the step again
        self._prepare(1)

    def _step_set(self) -> None:
        self._prepare(1)

    def step_ended(self, steps: int = 1) -> None:
        """Count a step, or several, that have ended in a loop of your own, and record metrics. ``fit`` does so itself."""
        self._meter.step(steps)
        rate = plain_variable(getattr(self._inner, "_learning_rate", None))
        if hasattr(rate, "assign") or self._measuring:  # a schedule would compute the rate at each step
            record_metric(LEARNING_RATE, learning_rate(self._inner), self.step, time.monotonic_ns())
        self.counted(steps)

    def counted(self, steps: int) -> None:
        """Record the norm of the last of ``steps`` steps that have ended together, and that the meter has counted already."""
        now = time.monotonic_ns()
        if self._measuring:
            norm = float(self._norm.numpy())
            if norm != _NOTHING:  # otherwise loss scaling has skipped the step
                record_metric(GRADIENT_NORM, norm, self.step, now)
            if self._scale is not None:
                record_metric(LOSS_SCALE, self._scale, self.step, now)
        self._prepare(steps)

    def _prepare(self, steps: int) -> None:
        """Have the norm computed in the next steps if it is due in one of them; they are expected to be ``steps`` many."""
        self._measure(self._every > 0 and (self.step + steps) // self._every > self.step // self._every)

    def _measure(self, due: bool) -> None:
        if due != self._measuring:
            self._due.assign(due)
            self._measuring = due
        if due:
            self._norm.assign(_NOTHING)
            scale = loss_scale(self._optimizer)
            self._scale = None if scale is None else float(scale)

    def observe(self, gradients: Sequence[Any]) -> None:
        """Compute the norm of the optimizer's gradients if the step is due; in a graph, make the operations that do so."""
        dense = [
            each.values if isinstance(each, tf.IndexedSlices) else each
            for each in gradients
            if each is not None
        ]
        if not dense:
            return

        def measured() -> Any:
            return tf.identity(
                self._norm.assign(tf.linalg.global_norm([tf.cast(each, tf.float32) for each in dense]))
            )

        if tf.executing_eagerly():
            if self._measuring:
                measured()
        else:
            tf.cond(self._due, measured, lambda: tf.identity(self._norm))

    def close(self) -> None:
        """Record no more. Idempotent. ``fit`` still records learning rates and step times of a distributed optimizer."""
        if getattr(self._inner, "hvdlab_watch", None) is not self:
            return
        # Functions that were traced with the watch go on to read the variable that this sets.
        self._measure(False)
        self._inner.__class__ = self._plain_class
        object.__delattr__(self._inner, "hvdlab_watch")
        if not isinstance(self._inner, Distributed):
            object.__delattr__(self._inner, "hvdlab_meter")


class _Watched:
    """Methods in front of a watched optimizer's own class, but behind those of :class:`Distributed`: they see reduced gradients."""

    hvdlab_watch: KerasWatch | None = None

    def _hvdlab_observe(self, gradients: Sequence[Any]) -> None:
        if self.hvdlab_watch is not None:  # a clone of the optimizer has none
            self.hvdlab_watch.observe(gradients)


class _WatchedApply(_Watched):
    """A watched optimizer of Keras 3."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        plain: Any = super()
        self._hvdlab_observe(grads)
        return plain.apply(grads, trainable_variables)


class _WatchedApplyGradients(_Watched):
    """A watched optimizer of Keras 2."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        pairs = list(grads_and_vars)
        self._hvdlab_observe([gradient for gradient, _ in pairs])
        return plain.apply_gradients(pairs, *args, **kwargs)


@cache
def _watched_class(kind: Any) -> Any:
    if issubclass(kind, _Watched):
        return kind  # the class of a clone
    *distributing, plain = kind.__bases__ if issubclass(kind, Distributed) else (kind,)
    mixin = _WatchedApply if hasattr(plain, "apply") else _WatchedApplyGradients
    members = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (*distributing, mixin, plain), members)


def watch(
    model: Any, optimizer: Any = None, *, batch_size: float | None = None, every: int = 10
) -> KerasWatch:
    """Record metrics of the training on this rank: step time, learning rate, norm of the gradients, loss scale.

    ``docs/reference/metrics.md`` has the names and the cost of each. For a distributed optimizer ``fit`` records the first two without
    this call, too. ``fit`` counts its steps itself; in a loop of your own, call the watch's ``step_ended()`` after each step. A
    ``tf.function`` of your own must be traced after this call. Calling it again for the same optimizer replaces the earlier watch, so
    a cell may be run twice.

    Args:
        model: A model of Keras 3 or of Keras 2.
        optimizer: The optimizer whose steps are counted, distributed or not; by default the one that the model was compiled with.
        batch_size: Samples that this rank trains with in a step, for samples per second; by default ``fit``'s, if that is known.
        every: After how many steps the norm of the gradients and the loss scale are recorded; 0 for never.

    Returns:
        The watch, whose ``batch_size`` and ``step`` may be set later, and which ``close()`` ends; it can be used as a context
        manager.

    Raises:
        InvalidRequestError: An argument has the wrong type, the model has no optimizer, ``every`` is negative, or ``batch_size`` is
            not positive and finite.
    """
    if package_of(model) is None:
        raise InvalidRequestError(f"hvd.watch() takes a model of Keras, not a {type(model).__name__}.")
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is None:
        raise InvalidRequestError(
            "hvd.watch() finds no optimizer: compile the model before, or give optimizer=."
        )
    if not is_keras_optimizer(chosen):
        raise InvalidRequestError(f"hvd.watch() takes an optimizer of Keras, not a {type(chosen).__name__}.")
    check_every(every)
    StepMeter().batch_size = batch_size  # raises for a wrong one before anything is changed
    record_fits(sys.modules[package_of_optimizer(chosen)])
    before: KerasWatch | None = getattr(without_scaling(chosen), "hvdlab_watch", None)
    if before is not None:
        before.close()
    return KerasWatch(model, chosen, batch_size, every)


_RECORD = "_hvdlab_record"
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
        """Give the layers of ``model``, one like the recorded model, these states within this context; restore the former ones afterwards."""
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
    """Record of a model's steps, from :func:`record`. It ends with :meth:`close`, or when the model is recorded again.

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

    # -- reports of a step --------------------------------------------------------------------------------------------

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
        _replace(model, _RECORD, self)
        model.train_function = None  # so that Keras traces the step again

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
                # The step's own operations come after those that begin its record: otherwise the loss could
                # go to the record of the step before.
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
        """Record, in the returned context, the norm of this rank's own gradients when the optimizer's reducer gets them."""

        def observe(gradients: Sequence[Any]) -> None:
            self.gradients(gradients, loss_scale(optimizer))

        return _observing(reducer_of(optimizer), observe)

    def close(self) -> None:
        """Stop recording and forget all records. Idempotent."""
        self._closed = True
        super().close()
        model, self._model = self._model, None
        if model is not None and vars(model).get(_RECORD) is self:
            for name in ("train_step", "compute_loss", _RECORD):
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

    Of each step of ``model.fit`` or ``train_on_batch`` the record keeps the inputs, the targets and the loss that
    ``model.compute_loss`` returns. If the optimizer is distributed, it keeps the norm of this rank's own gradients before they are
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
        before: KerasRecord | None = vars(model).get(_RECORD)
        if before is not None:
            before.close()
    return KerasRecord(model, last, memory)


def _not_rewritten(function: Any) -> Any:
    """Mark a function so that AutoGraph does not rewrite it, but still rewrites the functions that it calls."""
    return internal("autograph.impl.api").autograph_artifact(function)


def _as_rewritten(function: Any) -> Any:
    """Return a function of the user's, rewritten by AutoGraph if AutoGraph would have rewritten it without hvdlab."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def _placeholder(value: Any) -> Any:
    """Return a value's placeholder in a structure: for a sparse or ragged tensor, which has several tensors, its type; otherwise ``None``."""
    return tf.type_spec_from_value(value) if isinstance(value, tf.__internal__.CompositeTensor) else None


def _replace(model: Any, name: str, value: Any) -> None:
    """Assign an attribute past Keras, which would count it as a part of the model that it has to track."""
    object.__setattr__(model, name, value)


@contextmanager
def _observing(
    reducer: TensorFlowReducer | None, observer: Callable[[Sequence[Any]], None]
) -> Iterator[None]:
    if reducer is None:
        yield
        return
    before, reducer.observer = reducer.observer, observer
    try:
        yield
    finally:
        reducer.observer = before


def _parts(data: Any) -> tuple[Any, ...]:
    """Return the inputs, targets and sample weights that ``fit`` passes to a step, as far as there are any."""
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
    """Return the value in a form that nothing changes later: a variable or an array is copied to a tensor."""
    plain = plain_variable(value)
    return tf.convert_to_tensor(plain) if isinstance(plain, np.ndarray | tf.Variable) else plain


def _values(gradients: Sequence[Any]) -> list[Any]:
    return [
        each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None
    ]


def _dense(tensor: Any) -> Any:
    """Return the elements of a tensor, also of a sparse or ragged one."""
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

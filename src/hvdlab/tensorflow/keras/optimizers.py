"""Distributed optimizers of Keras 3 (on TensorFlow) and of Keras 2 (``tf_keras``): instances of a subclass of the given one's class.

The subclass has the name and module of its base, so that a model that was saved with it can be loaded without hvdlab. With hvdlab,
:func:`load_model` loads a model and makes its optimizer distributed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

from hvdlab.bindings.arguments import Adasum, Average, Sum, checked_operator
from hvdlab.bindings.monitoring import StepMeter
from hvdlab.collectives import basics
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.collectives.types import ReduceOp
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.errors import JIT
from hvdlab.tensorflow.functions import plain_variable, vars_to_refs
from hvdlab.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdlab.tensorflow.gradient_tape import DistributedGradients, Groups, TensorFlowReducer
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.fit_hooks import record_fits

_PACKAGES = ("keras", "tf_keras")
_OF_TF1 = "experimental_run_tf_function"
"""An argument of compile() that programs of TensorFlow 2.0 give, and Keras 3 has no more."""


class Distributed(DistributedGradients):
    """The attributes and methods that a distributed optimizer has in front of those of its own class.

    Attributes:
        hvdlab_reducer: Reduces gradients.
        hvdlab_helper: Adds gradients up over the passes of a step; ``None`` if a step has one pass.
        hvdlab_reduced: Whether the gradients that are being applied have been reduced already, by an outer method.
        hvdlab_computed: Whether ``compute_gradients`` has reduced the gradients that are applied next.
        hvdlab_meter: Measures the steps of ``fit``.
        hvdlab_settings: The arguments of :func:`distributed` that it was made with.
    """

    hvdlab_reducer: TensorFlowReducer
    hvdlab_helper: LocalGradientAggregationHelper | None
    hvdlab_reduced: bool
    hvdlab_computed: bool
    hvdlab_meter: StepMeter
    hvdlab_settings: dict[str, Any]
    _HAS_AGGREGATE_GRAD = True

    @property
    def _agg_helper(self) -> LocalGradientAggregationHelper | None:
        """Return :attr:`hvdlab_helper`, under Horovod's name."""
        return self.hvdlab_helper

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any] | None) -> list[Any]:
        """Return the gradients that a pass applies: reduced, or with several passes per step as the helper decides.

        Packages replace this method of Horovod's optimizers, and :meth:`_allreduce_grads`, on an instance: every reduction goes
        through both.

        Args:
            grads: This rank's gradients.
            vars: Their variables.
        """
        if self.hvdlab_helper is not None:
            assert vars is not None, "the sums of several passes are kept by variable"
            return self.hvdlab_helper.compute_gradients(grads, vars)
        return list(self._allreduce_grads(grads, vars))

    def _allreduce_grads(self, grads: Sequence[Any], vars: Sequence[Any] | None = None) -> list[Any]:
        """Return gradients reduced over all ranks, but for those of local variables.

        Args:
            grads: This rank's gradients, or the sums of several passes.
            vars: Their variables.
        """
        return self.hvdlab_reducer(grads, vars)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a plain optimizer that is distributed with the default settings, as Keras does to clone one by its class."""
        super().__init__(*args, **kwargs)
        self._hvdlab_set(
            reducer=TensorFlowReducer(f"Distributed{type(self).__name__}"),
            helper=None,
            reduced=False,
            computed=False,
            meter=StepMeter(),
            settings={},
        )

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradients on their rank: they are not reduced."""
        self.hvdlab_reducer.register_local_var(plain_variable(var))
        if self.hvdlab_helper is not None:
            self.hvdlab_helper.register_local_var(plain_variable(var))

    def _hvdlab_parts(self) -> list[Any]:
        return [part for part in (self.hvdlab_reducer, self.hvdlab_helper) if part is not None]

    def _hvdlab_change(self, name: str, value: Any) -> None:
        super()._hvdlab_change(name, value)
        self._hvdlab_set(settings={**self.hvdlab_settings, name: value})

    def _hvdlab_set(self, **values: Any) -> None:
        """Assign attributes past Keras, which would count them as parts of the optimizer that it has to track."""
        for name, value in values.items():
            object.__setattr__(self, f"hvdlab_{name}", value)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce gradients over all ranks and apply them to variables. All ranks must call it alike.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            args, kwargs: Further arguments of the plain optimizer's method.

        Returns:
            The plain optimizer's result.

        Raises:
            MismatchError, AbortedError: As for ``hvd.allreduce``; the variables are unchanged.
        """
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        plain: Any = super()
        computed = self.hvdlab_computed
        # Before they are applied: if that fails, the next gradients have to be reduced all the same.
        self._hvdlab_set(computed=False)
        if computed:
            with self._hvdlab_with_reduced():
                return plain.apply_gradients(pairs, *args, **kwargs)
        if self.hvdlab_reduced:
            return plain.apply_gradients(pairs, *args, **kwargs)
        variables = [variable for _, variable in pairs]

        def apply(gradients: Sequence[Any]) -> Any:
            with self._hvdlab_with_reduced():
                return plain.apply_gradients(list(zip(gradients, variables, strict=True)), *args, **kwargs)

        return self._hvdlab_step([gradient for gradient, _ in pairs], variables, apply)

    @contextmanager
    def _hvdlab_with_reduced(self) -> Iterator[None]:
        before, self.hvdlab_reduced = self.hvdlab_reduced, True
        try:
            yield
        finally:
            self.hvdlab_reduced = before

    def _hvdlab_computed_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return pairs with reduced gradients, which the next :meth:`apply_gradients` applies as they are.

        With several backward passes per step the pairs stay this rank's own, and :meth:`apply_gradients` reduces them.
        """
        listed = list(pairs)
        if self.hvdlab_reduced or self.hvdlab_helper is not None:
            return listed
        variables = [variable for _, variable in listed]
        reduced = self._allreduce([gradient for gradient, _ in listed], variables)
        self._hvdlab_set(computed=True)
        return list(zip(reduced, variables, strict=True))

    def _hvdlab_step(self, gradients: list[Any], variables: Sequence[Any], apply: Callable[..., Any]) -> Any:
        plain = [plain_variable(variable) for variable in variables]
        helper = self.hvdlab_helper
        if helper is None:
            return apply(self._allreduce(gradients, plain))
        if not getattr(self, "built", getattr(self, "_built", True)):
            with tf.init_scope():
                self.build(variables)  # type: ignore[attr-defined]  # tf.cond must not make variables
        reduced = self._allreduce(gradients, plain)
        return helper.apply_gradients(lambda: apply(reduced), self)


class DistributedWithCompute(Distributed):
    """A distributed optimizer of Keras 2 whose class has a public method that computes gradients."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return, for Keras 2, pairs of reduced gradients and variables, for the next :meth:`apply_gradients`.

        With several backward passes per step, the gradients are this rank's own, and :meth:`apply_gradients` reduces them.

        Args:
            args, kwargs: The arguments of the plain optimizer's method.

        Raises:
            MismatchError, AbortedError: As for ``hvd.allreduce``.
        """
        plain: Any = super()
        return self._hvdlab_computed_pairs(plain.compute_gradients(*args, **kwargs))


class DistributedLegacy(Distributed):
    """A distributed optimizer of Keras 2's ``legacy`` ones, whose methods that compute gradients are private or for graphs."""

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradients and variables, for the next :meth:`apply_gradients`.

        Args:
            loss: A tensor, or a function that returns one.
            var_list: The variables, or a function that returns them.
            grad_loss: The gradient of ``loss``; ones by default.
            tape: The tape that recorded ``loss``, if ``loss`` is a tensor.

        Raises:
            MismatchError, AbortedError: As for ``hvd.allreduce``.
        """
        plain: Any = super()
        return self._hvdlab_computed_pairs(plain._compute_gradients(loss, var_list, grad_loss, tape))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return reduced gradients in graphs of TensorFlow 1, for the next :meth:`apply_gradients`.

        Args:
            loss: A tensor.
            params: The variables.

        Raises:
            ValueError: A variable has no gradient.
        """
        plain: Any = super()
        listed = tf.nest.flatten(params)
        pairs = zip(plain.get_gradients(loss, listed), listed, strict=True)
        return [gradient for gradient, _ in self._hvdlab_computed_pairs(pairs)]


class DistributedWithApply(Distributed):
    """A distributed optimizer of Keras 3, in which all other methods apply gradients through ``apply``."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce gradients over all ranks and apply them, for Keras 3. All ranks must call it alike.

        Args:
            grads: The gradients.
            trainable_variables: Their variables; by default those that the optimizer was built for.

        Raises:
            MismatchError, AbortedError: As for ``hvd.allreduce``; the variables are unchanged.
        """
        plain: Any = super()
        if self.hvdlab_reduced:
            return plain.apply(grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]

        def apply(gradients: Sequence[Any]) -> Any:
            with self._hvdlab_with_reduced():
                return plain.apply(list(gradients), trainable_variables)

        return self._hvdlab_step(list(grads), variables, apply)


@cache
def _distributed_class(kind: Any) -> Any:
    members = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    base = Distributed
    if hasattr(kind, "apply"):
        base = DistributedWithApply
    elif hasattr(kind, "compute_gradients"):
        base = DistributedWithCompute
    elif hasattr(kind, "_compute_gradients"):
        base = DistributedLegacy
    return type(kind.__name__, (base, kind), members)


def is_keras_optimizer(value: Any) -> bool:
    """Return whether this is an optimizer of Keras 3, or of Keras 2 (also of its ``legacy`` ones)."""
    return any(
        kind.__name__ in ("Optimizer", "OptimizerV2") and kind.__module__.partition(".")[0] in _PACKAGES
        for kind in type(value).__mro__
    )


def reducer_of(optimizer: Any) -> TensorFlowReducer | None:
    """Return the reducer of an optimizer, also of one within loss scaling; ``None`` if the optimizer is not distributed."""
    found = without_scaling(optimizer)
    return found.hvdlab_reducer if isinstance(found, Distributed) else None


def distributed(
    optimizer: Any,
    *,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    in_place: bool = False,
) -> Any:
    """Make a distributed optimizer with the settings, and the state, of another one.

    Args:
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, groups, process_set, scale_local_gradients: As for
            :func:`hvdlab.tensorflow.keras.DistributedOptimizer`.
        in_place: Make this object itself distributed, so that other objects that refer to it have the distributed one.

    Raises:
        InvalidRequestError: ``optimizer`` is no optimizer of Keras, or distributed already, or another argument is wrong.
        UnsupportedError: ``op`` is ``Adasum``, or Keras does not run on TensorFlow.
    """
    if not is_keras_optimizer(optimizer):
        raise InvalidRequestError(
            f"hvd.DistributedOptimizer takes an optimizer of Keras or of tf_keras, not {type(optimizer).__name__}."
        )
    if isinstance(optimizer, Distributed) or isinstance(_inner(optimizer), Distributed):
        raise InvalidRequestError(
            "This optimizer is distributed already: its gradients would be reduced twice."
        )
    chosen = checked_operator(op)
    if chosen is Adasum:
        raise UnsupportedError("Optimizers of Keras can't use Adasum; use one of tf.compat.v1.train with it.")
    if chosen not in (Average, Sum):
        raise InvalidRequestError(
            f"Optimizers of Keras reduce gradients with hvd.Average or hvd.Sum, not with {chosen.name.lower()}."
        )
    _refuse_other_backends(optimizer)
    label = name or f"Distributed{type(optimizer).__name__}"
    reducer = TensorFlowReducer(
        label,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        chosen,
        gradient_predivide_factor,
        groups,
        process_set,
        scale_local_gradients,
    )
    helper = None
    if backward_passes_per_step != 1:
        helper = LocalGradientAggregationHelper(
            backward_passes_per_step,
            # By the instance, whose method may have been replaced.
            lambda gradients, variables: made._allreduce_grads(gradients, variables),
            sparse_as_dense,
            average_aggregated_gradients,
            basics.rank() if basics.is_initialized() else 0,
            type(optimizer),
            process_set,
            scale_local_gradients,
        )
    original: Any = type(optimizer)
    kind = _distributed_class(original)
    if in_place:
        made = optimizer
        made.__class__ = kind
    else:
        made = kind.from_config(optimizer.get_config())
        _copy_state(optimizer, made)
    settings = {
        "name": name,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "gradient_predivide_factor": gradient_predivide_factor,
        "op": chosen,
        "backward_passes_per_step": backward_passes_per_step,
        "average_aggregated_gradients": average_aggregated_gradients,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    made._hvdlab_set(
        reducer=reducer, helper=helper, reduced=False, computed=False, meter=StepMeter(), settings=settings
    )
    package = sys.modules[package_of_optimizer(optimizer)]
    _pickle_distributed(package)
    _reduce_before_scaling(package)
    _compile_without_xla(package)
    record_fits(package)
    return made


def package_of_optimizer(optimizer: Any) -> str:
    """Return the package that an optimizer comes from, ``keras`` (3) or ``tf_keras`` (2). Its class may be a user's subclass."""
    return next(
        name for each in type(optimizer).__mro__ if (name := each.__module__.partition(".")[0]) in _PACKAGES
    )


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", None)


def without_scaling(optimizer: Any) -> Any:
    """Return the optimizer within loss scaling; the optimizer itself if there is none."""
    return _inner(optimizer) or optimizer


def loss_scale(optimizer: Any) -> Any:
    """Return the factor by which mixed precision multiplies the loss, and so the gradients; ``None`` without loss scaling."""
    if _inner(optimizer) is None:
        return None
    scaled = getattr(optimizer, "scale_loss", None) or optimizer.get_scaled_loss
    return scaled(tf.constant(1.0))


def _refuse_other_backends(optimizer: Any) -> None:
    keras = sys.modules.get("keras")
    if type(optimizer).__module__.startswith("keras.") and keras is not None:
        backend = keras.config.backend() if hasattr(keras, "config") else "tensorflow"
        if backend != "tensorflow":
            raise UnsupportedError(
                f"hvdlab's Keras works on TensorFlow, and Keras runs on {backend}; set KERAS_BACKEND=tensorflow, or "
                "use hvdlab.torch with a training loop of your own."
            )


def _copy_state(optimizer: Any, into: Any) -> None:
    """Copy the values of an optimizer's variables to another one, if the optimizer has made its variables."""
    variables = getattr(optimizer, "_trainable_variables", None)
    if not getattr(optimizer, "built", False) or not variables:
        return
    into.build(variables)
    for mine, its in zip(into.variables, optimizer.variables, strict=True):
        mine.assign(its)


# -- pickled models ---------------------------------------------------------------------------------------------------


def _pickle_distributed(package: Any) -> None:
    """Patch Keras so that a model that is pickled, as for a rank that comes later, keeps its optimizer distributed.

    Keras pickles a model as the file that it would save. From this file the optimizer comes back as one of Keras' own.
    """
    original = package.Model.__reduce__
    if hasattr(original, "hvdlab"):
        return

    @functools.wraps(original)
    def reduce(self: Any) -> Any:
        reduced = original(self)
        optimizer = getattr(self, "optimizer", None)
        optimizer = _inner(optimizer) or optimizer
        if not isinstance(optimizer, Distributed) or len(reduced) != 2:  # no file: it was not built
            return reduced
        position = {vars_to_refs(plain_variable(each)): i for i, each in enumerate(self.trainable_variables)}
        settings = dict(optimizer.hvdlab_settings)
        if isinstance(settings.get("groups"), list | tuple):
            settings["groups"] = [
                [position[vars_to_refs(plain_variable(each))] for each in group]
                for group in settings["groups"]
            ]
        local = [i for reference, i in position.items() if reference in optimizer.hvdlab_reducer.local]
        policy = getattr(self, "dtype_policy", None) or self._dtype_policy
        scale = [each.numpy() for each in _scale_of(self.optimizer)]
        return _received, (*reduced, package.__name__, policy.name, scale, settings, local)

    reduce.hvdlab = True  # type: ignore[attr-defined]
    package.Model.__reduce__ = reduce


def _received(
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    package: str,
    policy: str,
    scale: list[Any],
    settings: dict[str, Any],
    local: list[int],
) -> Any:
    """Unpickle a model with a distributed optimizer. A step of several backward passes that was in progress is lost.

    Args:
        make, arguments: Keras' own function and arguments for unpickling the model.
        package: Name of the package of Keras.
        policy: Name of the model's dtype policy. Keras decides by it whether to scale the loss, but does not save a model's own
            policy: it uses the process's.
        scale: For Keras 2, which does not save them: the values of the loss scaling's variables. All ranks must have the same
            scale, since gradients are summed before they are divided by it.
        settings: The arguments of :func:`distributed`, with groups as lists of places among the trainable variables.
        local: The places of local variables.
    """
    precision: Any = sys.modules[package].mixed_precision
    before = precision.global_policy()
    precision.set_global_policy(policy)
    try:
        model = make(*arguments)
    finally:
        precision.set_global_policy(before)
    variables = model.trainable_variables
    if isinstance(settings.get("groups"), list):
        settings["groups"] = [[variables[i] for i in group] for group in settings["groups"]]
    optimizer = _inner(model.optimizer) or model.optimizer
    distributed(optimizer, **settings, in_place=True)  # the loss scaling around it refers to it
    for i in local:
        optimizer.register_local_var(variables[i])
    for variable, value in zip(_scale_of(model.optimizer), scale, strict=True):
        variable.assign(value)
    return model


def _scale_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the variables of Keras 2's dynamic loss scaling; Keras 3 has these among the optimizer's own variables."""
    state = getattr(optimizer, "_loss_scale", None)
    if state is None or not hasattr(state, "current_loss_scale"):
        return ()
    return state.current_loss_scale, state.counter


# -- XLA --------------------------------------------------------------------------------------------------------------


def _compile_without_xla(package: Any) -> None:
    """Patch ``Model.compile`` to refuse XLA for a distributed optimizer, and not to choose it as Keras 3 does on GPUs.

    The error must come from ``compile``: if tracing the first step fails, the model keeps weights without values, and can't be
    trained any more.
    """
    owner = next(kind for kind in package.Model.__mro__ if "compile" in vars(kind))
    original = owner.compile
    if hasattr(original, "hvdlab"):
        return

    taken = inspect.signature(original).parameters.values()
    accepts_of_tf1 = any(one.name == _OF_TF1 or one.kind is one.VAR_KEYWORD for one in taken)

    @functools.wraps(original)
    def compile(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, Distributed) or isinstance(_inner(optimizer), Distributed):
            if kwargs.get("jit_compile") is True:
                raise UnsupportedError(JIT)
            if kwargs.get("jit_compile", "auto") == "auto":
                kwargs["jit_compile"] = False
            if _OF_TF1 in kwargs and not accepts_of_tf1:
                warnings.warn(
                    f"hvdlab: Keras 3 has no {_OF_TF1}, which model.compile() was given, and needs none; it is left out. "
                    "TF_USE_LEGACY_KERAS=1 brings back Keras 2.",
                    stacklevel=2,
                )
                del kwargs[_OF_TF1]
        return original(self, optimizer, *args, **kwargs)

    compile.hvdlab = True  # type: ignore[attr-defined]
    owner.compile = compile  # on this class, where Keras looks whether a subclass has a compile() of its own


# -- mixed precision --------------------------------------------------------------------------------------------------


def _reduce_before_scaling(package: Any) -> None:
    """Patch Keras' loss scaling so that it decides on reduced gradients whether to take a step.

    ``compile`` puts a ``LossScaleOptimizer`` around the optimizer, which calls it only if all gradients are finite. If the inner
    optimizer reduced them, a rank whose own gradients are finite would wait for a rank whose are not. Gradients that are not reduced
    before, since a step has several passes or they are local, make all ranks skip the pass if they are not finite on one.
    """
    for owner in (package, getattr(package, "mixed_precision", None)):
        scaling = getattr(getattr(owner, "optimizers", owner), "LossScaleOptimizer", None) or getattr(
            owner, "LossScaleOptimizer", None
        )
        # Keras 2 has the name for the base of its two classes, of which each has the method itself.
        for kind in () if scaling is None else (scaling, *scaling.__subclasses__()):
            for method in ("apply", "apply_gradients"):
                if method in vars(kind) and not hasattr(vars(kind)[method], "hvdlab"):
                    setattr(kind, method, _reducing_first(vars(kind)[method], pairs=method != "apply"))


def _reducing_first(original: Callable[..., Any], *, pairs: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        inner = _inner(self)
        if not isinstance(inner, Distributed) or inner.hvdlab_reduced:
            return original(self, given, *args, **kwargs)
        listed = list(given)
        gradients = [gradient for gradient, _ in listed] if pairs else listed
        within = inner.hvdlab_helper is not None
        if inner.hvdlab_computed:
            inner._hvdlab_set(computed=False)
        elif not within:
            variables = (
                [v for _, v in listed] if pairs else args[0] if args else kwargs.get("trainable_variables")
            )
            plain = None if variables is None else [plain_variable(each) for each in variables]
            gradients = inner._allreduce(gradients, plain)
        if within or inner.hvdlab_reducer.local:
            # These were not reduced: they are finite on some ranks alone.
            gradients = inner.hvdlab_reducer.spread_overflow(gradients)
        if pairs:
            gradients = [(gradient, v) for gradient, (_, v) in zip(gradients, listed, strict=True)]
        if within:
            return original(self, gradients, *args, **kwargs)
        with inner._hvdlab_with_reduced():
            return original(self, gradients, *args, **kwargs)

    apply.hvdlab = True  # type: ignore[attr-defined]
    return apply


def package_of(model: Any) -> str | None:
    """Return the package that a model comes from, Keras 3 or Keras 2; ``None`` if it is no model of Keras."""
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return next((name for name in _PACKAGES if name in packages and hasattr(model, "fit")), None)


def load_model(
    keras: Any, filepath: Any, custom_optimizers: Any, custom_objects: Any, compression: type[Compressor]
) -> Any:
    """See :func:`hvdlab.tensorflow.keras.load_model`; ``keras`` is the module of Keras whose model it is."""
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    name = _saved_optimizer(filepath)
    if isinstance(objects.get(name), FunctionType):
        objects[name] = _class_of(objects[name])
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = without_scaling(getattr(model, "optimizer", None))
    _build(optimizer, model.trainable_variables)
    if is_keras_optimizer(optimizer) and not isinstance(optimizer, Distributed):
        # In place: the model's functions, and the loss scaling around the optimizer, refer to this object.
        distributed(optimizer, compression=compression, in_place=True)
    return model


def _build(optimizer: Any, variables: Any) -> None:
    """Build an optimizer again that Keras 3 has built without variables, as for an ``.h5`` file: it could not train the model."""
    if (
        getattr(optimizer, "built", False)
        and variables
        and not getattr(optimizer, "_trainable_variables", variables)
    ):
        optimizer.built = False
        optimizer.build(variables)


def _saved_optimizer(filepath: Any) -> str | None:
    """Return the name of the optimizer's class in a file of Keras; ``None`` if the file does not have it."""
    path = os.fspath(filepath) if isinstance(filepath, str | os.PathLike) else ""
    found: Any = None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if "config.json" in file.namelist():  # otherwise Keras raises an error for the file
                found = (json.loads(file.read("config.json")).get("compile_config") or {}).get("optimizer")
    elif os.path.isfile(path):
        h5py: Any = importlib.import_module("h5py")
        if h5py.is_hdf5(path):
            with h5py.File(path) as file:
                found = json.loads(file.attrs.get("training_config", "{}")).get("optimizer_config")
    while isinstance(found, dict) and "inner_optimizer" in (found.get("config") or {}):
        found = found["config"]["inner_optimizer"]
    return found.get("class_name") if isinstance(found, dict) else None


def _class_of(make: Callable[..., Any]) -> type:
    """Return a class whose ``from_config`` calls a function that makes the optimizer: Keras accepts only a class there."""
    return type(make.__name__, (), {"from_config": staticmethod(lambda config: make(**config))})

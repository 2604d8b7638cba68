"""Elastic training: it goes on when ranks are lost, and when ranks come back.

::

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(state)

Example:
    >>> import tensorflow as tf
    >>> import hvdlab.tensorflow as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> weight = tf.Variable(1.0)
    >>> state = hvd.elastic.TensorFlowState([weight], epoch=0)
    >>> _ = weight.assign(5.0)
    >>> state.restore()  # as after a failure: back to the last commit
    >>> float(weight)
    1.0
    >>> hvd.shutdown()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdlab.bindings.elastic_sampler import ElasticSampler
from hvdlab.bindings.elastic_state import HandledState, HandlerRegistry, SamplerStateHandler, StateHandler
from hvdlab.bindings.objects import allgather_object
from hvdlab.bindings.objects import broadcast_object as _broadcast
from hvdlab.collectives.elastic import HostsUpdatedInterrupt, ObjectState, State, run_fn
from hvdlab.collectives.errors import CollectiveError as HorovodInternalError
from hvdlab.tensorflow.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    make_optimizer_variables,
    optimizer_variables,
    plain_variable,
)
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.mpi_ops import init, is_initialized, rank, shutdown

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


class _Variables(ABC):
    """A list of variables, and for TensorFlow 1 the session that has their values."""

    @abstractmethod
    def get(self) -> Sequence[Any]:
        """Return the variables that exist by now."""

    @property
    def session(self) -> Any:
        """Return the session that has the values; ``None`` outside of TensorFlow 1."""
        return None

    def make(self) -> None:  # noqa: B027  (most variables exist from the start)
        """Make the variables that do not exist yet."""

    def early(self) -> bool:
        """Return whether they can be made before the training needs them: it will make the same."""
        return False

    def read(self) -> list[Any]:
        variables = [plain_variable(each) for each in self.get()]
        if self.session is not None:
            return list(self.session.run(variables))
        return [variable.numpy() for variable in variables]

    def write(self, values: Sequence[Any]) -> None:
        variables = [plain_variable(each) for each in self.get()]
        # Values that were saved before the optimizer's first step are fewer than its variables.
        for variable, value in zip(variables, values, strict=False):
            if self.session is not None:
                variable.load(value, self.session)
            else:
                variable.assign(value)


class _PlainVariables(_Variables):
    """Variables of a :class:`TensorFlowState`, and its session."""

    def __init__(self, state: TensorFlowState) -> None:
        self._state = state

    def get(self) -> Sequence[Any]:
        return self._state.variables

    @property
    def session(self) -> Any:
        return self._state.session


class _ModelVariables(_Variables):
    """Variables of the model of a :class:`TensorFlowKerasState`."""

    def __init__(self, state: TensorFlowKerasState) -> None:
        self._state = state

    def get(self) -> Sequence[Any]:
        variables: Sequence[Any] = self._state.model.variables
        return variables


class _OptimizerVariables(_Variables):
    """Variables of the optimizer of a :class:`TensorFlowKerasState`, which its first step makes."""

    def __init__(self, state: TensorFlowKerasState) -> None:
        self._state = state

    def get(self) -> Sequence[Any]:
        return optimizer_variables(self._state.optimizer)

    def make(self) -> None:
        make_optimizer_variables(self._state.optimizer, self._state.model.trainable_variables)

    def early(self) -> bool:
        # fit() makes them for the trainable variables; a loop of the user's could train others.
        return self._state.optimizer is getattr(self._state.model, "optimizer", None)


class _VariablesHandler(StateHandler[_Variables]):
    """The values of variables, kept in the host's memory."""

    def __init__(self, value: _Variables) -> None:
        super().__init__(value)
        self._saved = value.read()

    def save(self) -> None:
        self._saved = self.value.read()

    def restore(self) -> None:
        self.value.write(self._saved)

    def sync(self) -> None:
        """Broadcast the root's values. If ranks have different numbers of variables, each makes those that it lacks before.

        An optimizer makes its variables only in its first step, so a rank that has just come has none. Values that are saved without
        them can't be restored after that step, so that variables are made where it is known which ones the training makes.
        """
        if self.value.session is None:
            if len(set(allgather_object(len(self.value.get())))) > 1 or self.value.early():
                self.value.make()
            broadcast_variables(self.value.get(), self.root_rank)
        else:
            self.value.write(_broadcast(self.value.read(), self.root_rank))
        self.save()


_registry = HandlerRegistry([(_Variables, _VariablesHandler), (ElasticSampler, SamplerStateHandler)])


class TensorFlowState(HandledState):
    """The state of a training with plain variables; each further argument becomes an attribute.

    Args:
        variables: The variables; by default TensorFlow 1's global variables.
        session: For TensorFlow 1, the session that has their values; by default TensorFlow's default session.
        kwargs: Values such as ``epoch=0``, which become attributes.

    Other variables, or another session, may be assigned to the state: from then on they are saved, restored and synchronized.
    """

    variables: Sequence[Any]
    session: Any

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        given = tf.compat.v1.global_variables() if variables is None else list(variables)
        if session is None and not tf.executing_eagerly():
            session = tf.compat.v1.get_default_session()
        object.__setattr__(self, "variables", given)  # first: the handler reads them
        object.__setattr__(self, "session", session)
        super().__init__(_registry, variables_=_PlainVariables(self), **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "variables":
            self._handlers["variables_"].save()  # those of the former variables are not theirs


class TensorFlowKerasState(HandledState):
    """The state of a training with Keras: the variables of a model and of its optimizer.

    Args:
        model: A model of Keras 3 or of Keras 2 that has been built.
        optimizer: Its optimizer; by default the one that the model was compiled with.
        backend: Not used: values are read without a session.
        kwargs: Values such as ``batch=0`` and ``epoch=0``, which become attributes.

    Another model, or another optimizer, may be assigned to the state: from then on it is saved, restored and synchronized.

    Raises:
        ValueError: The model has no variables yet.
    """

    model: Any
    optimizer: Any
    backend: Any

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        chosen = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        _check_built(model)
        object.__setattr__(self, "model", model)  # first: the handlers read them
        object.__setattr__(self, "optimizer", chosen)
        object.__setattr__(self, "backend", backend)
        super().__init__(
            _registry, model_=_ModelVariables(self), optimizer_=_OptimizerVariables(self), **kwargs
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "model":
            _check_built(value)
        super().__setattr__(name, value)
        if name in ("model", "optimizer"):
            self._handlers[f"{name}_"].save()  # the values of the former one are not this one's


def _check_built(model: Any) -> None:
    if hasattr(model, "built") and not model.built:
        raise ValueError("The model has no variables yet: build it, or call it once, before a state gets it.")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training function elastic; its first argument is a state, such as a :class:`TensorFlowKerasState`.

    The function that is returned synchronizes the state over the ranks and calls ``func``. When a rank is lost, the others go
    back to their last commit and call ``func`` again; when a rank comes back, they let it in at the next commit, give it their
    state and call ``func`` again. :func:`hvdlab.collectives.elastic.run_fn` has the details.

    All ranks call the returned function alike. The program may run no other collective before it, since a rank that comes back
    would run that collective alone.

    Args:
        func: Trains, from wherever the state is. It may be called any number of times.

    Returns:
        The elastic function. It returns the result of ``func``, and raises its exceptions; also ``HorovodInternalError`` if
        trying again makes no sense, ``StartError`` if too few ranks came together within ``HOROVOD_ELASTIC_TIMEOUT`` seconds,
        and ``SystemExit(0)`` on a rank whose host leaves the job.
    """
    return run_fn(func, _reset)


def _reset() -> Any:
    """Initialize again if the training function has called ``shutdown``; otherwise the engines rebuild the world by themselves."""
    if not is_initialized():
        init()

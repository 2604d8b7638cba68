"""Broadcasts of variables and Python objects, and the allgather of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hvdlab.bindings import objects
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.tensorflow.errors import translated
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.mpi_ops import broadcast_

_v1 = tf.compat.v1


@translated
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assign the values that variables have on ``root_rank`` to them on every rank.

    Args:
        variables: Variables of TensorFlow or of Keras, of equal shapes and dtypes on every rank, in the same order.
        root_rank: The rank whose values all get: a rank of the world, also within a process set.
        process_set: The ranks that take part; all by default.
        inplace: Has no effect: the variables are assigned to in either case.

    Returns:
        In a graph of TensorFlow 1 an operation, which must be run; otherwise ``None``.

    Raises:
        InvalidRequestError: An argument is wrong, or this rank is not in the process set. Nothing was sent.
        NotInitializedError: ``init()`` was not called.
        MismatchError: The ranks disagree about the variables (some were made on some ranks only, or in another order).
        AbortedError: It can't complete: a rank died, failed, left, was interrupted, ... The group can go on.

    After a failed broadcast the variables have their former values.
    """
    given = [plain_variable(variable) for variable in variables]
    if not given:
        return None if tf.executing_eagerly() else tf.no_op()
    assigned = broadcast_(given, root_rank, name="broadcast_variables", process_set=process_set)
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*assigned)


def plain_variable(variable: Any) -> Any:
    """Return TensorFlow's variable behind one of Keras 3; any other variable itself."""
    inner = getattr(variable, "_value", None)
    return inner if hasattr(inner, "assign") else variable


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer of Keras has made by now; an empty list for ``None``."""
    if not hasattr(optimizer, "variables"):
        return []
    listed: Any = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [variable for variable in listed if hasattr(plain_variable(variable), "assign")]


def make_optimizer_variables(optimizer: Any, variables: Iterable[Any]) -> None:
    """Have an optimizer of Keras make its variables for these trainable ones now, if it has not: otherwise its first step would."""
    make = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
    given = list(variables)
    if make is not None and given and not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        make(given)


def broadcast_global_variables(root_rank: int) -> Any:
    """Make, for TensorFlow 1, an operation that assigns ``root_rank``'s values to all global variables on every rank.

    Args:
        root_rank: The rank whose values all get.

    Returns:
        The operation, which every rank must run.

    Raises:
        RuntimeError: Execution is eager, so that there are no global variables.
        InvalidRequestError: ``root_rank`` is no rank of the world.
        MismatchError, AbortedError: From running the operation, if the collective fails; some variables may have been
            overwritten.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() works in graphs of TensorFlow 1 only; give the variables to "
            "hvd.broadcast_variables(model.variables, root_rank=0)."
        )
    return broadcast_variables(_v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(_v1.train.SessionRunHook):  # type: ignore[misc,name-defined,unused-ignore]
    """Hook that, when a session has been made, assigns ``root_rank``'s values to all global variables on every rank.

    For ``tf.compat.v1.train.MonitoredTrainingSession`` and estimators.

    Args:
        root_rank: The rank whose values all get.
        device: The device of the operations; by default that of the variables.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device

    def begin(self) -> None:
        """Make the broadcast's operation, once for each graph."""
        if self.bcast_op is None or self.bcast_op.graph is not _v1.get_default_graph():
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self.bcast_op)


# -- objects ----------------------------------------------------------------------------------------------------------


@translated
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return ``root_rank``'s object on every rank.

    Args:
        obj: Anything that cloudpickle can pickle; only the root's is used.
        root_rank: The rank whose object all get: a rank of the world, also within a process set.
        session: Not used: objects do not go through TensorFlow.
        name: Equal on all ranks. Calls without a name are matched in order.
        process_set: The ranks that take part; all by default.

    Returns:
        On the root ``obj`` itself, on other ranks a copy.

    Raises:
        InvalidRequestError: The process set is not registered, or has no such root. Nothing was sent.
        MismatchError, AbortedError: The ranks disagree, or one failed before it called this; the group can go on.
        NotInitializedError: ``init()`` was not called.

    After a failed call the root's object is unchanged.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return ``broadcast_object`` with its other arguments fixed, for repeated use.

    Args:
        root_rank: The rank whose object all get: a rank of the world, also within a process set.
        session: Not used: objects do not go through TensorFlow.
        name: Equal on all ranks. Calls without a name are matched in order.
        process_set: The ranks that take part; all by default.

    Returns:
        A function ``f(obj)`` that returns the root's object.

    Raises:
        InvalidRequestError, MismatchError, AbortedError: From the returned function, as from
            :func:`broadcast_object`.
    """

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@translated
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the list of all ranks' objects, in the order of the ranks, on every rank.

    Args:
        obj: Anything that cloudpickle can pickle.
        session: Not used: objects do not go through TensorFlow.
        name: Equal on all ranks. Calls without a name are matched in order.
        process_set: The ranks that take part; all by default.

    Raises:
        InvalidRequestError: The process set is not registered. Nothing was sent.
        MismatchError, AbortedError: The ranks disagree, or one failed before it called this; the group can go on.
        NotInitializedError: ``init()`` was not called.

    After a failed call the given objects are unchanged.
    """
    return objects.allgather_object(obj, name, process_set)


# -- names of Horovod's horovod.tensorflow.util that packages use -----------------------------------------------------


def _executing_eagerly() -> bool:
    """Return whether TensorFlow runs operations at once here, and not as parts of a function or a graph."""
    return bool(tf.executing_eagerly())


# -- as keys ----------------------------------------------------------------------------------------------------------


def vars_to_refs(vars: Any) -> Any:
    """Return references to variables, which can be keys of a dictionary: ``variable.ref()`` of each; lists become tuples of these.

    Args:
        vars: A variable, or nested lists and tuples of them.
    """
    if isinstance(vars, list | tuple):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref() if hasattr(vars, "ref") else _ById(vars)


def refs_to_vars(refs: Any) -> Any:
    """Return the variables behind the references that :func:`vars_to_refs` returned; tuples become lists.

    Args:
        refs: A reference, or nested lists and tuples of them.
    """
    if isinstance(refs, list | tuple):
        return [refs_to_vars(each) for each in refs]
    return refs.deref() if hasattr(refs, "deref") else refs


class _ById:
    """A reference to a variable that has no ``ref()``, such as one of Keras 3."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        return self._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other._variable is self._variable

"""Errors of collectives in TensorFlow: instances both of hvdlab's own classes and of TensorFlow's.

Code that was written for Horovod catches ``tf.errors.FailedPreconditionError`` if ranks disagree, and
``HorovodInternalError`` in elastic training; here one error is both. An error inside a function or a session passes
TensorFlow's C++ as a status with a text. This module keeps the error itself meanwhile, and raises it where the status comes
back to Python, in place of TensorFlow's own error with its many lines.
"""

from __future__ import annotations

import bdb
import functools
import itertools
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.errors import (
    CollectiveError,
    HvdlabError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    UnsupportedError,
)
from hvdlab.tensorflow.installed import internal, tf

_MOST_IN_FLIGHT = 64
"""Errors that are kept for statuses that may still come back to Python; errors are rare, and their statuses come back soon."""

_MARK = re.compile(r"\s*\[hvdlab error (\d+)\]")
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"
_OUR_OPS = re.compile(r"\bHvdlab[A-Z][a-z]+")

JIT = (
    "hvdlab's collectives can't be compiled by XLA. Use tf.function without jit_compile=True, and in Keras "
    "model.compile(..., jit_compile=False)."
)
"""The error's text for a collective in a function that XLA would compile."""


# -- classes ----------------------------------------------------------------------------------------------------------


def _tensorflow_class(error: HvdlabError) -> Any:
    if isinstance(error, NotInitializedError | MismatchError):
        return tf.errors.FailedPreconditionError
    if isinstance(error, InvalidRequestError):
        return tf.errors.InvalidArgumentError
    return tf.errors.UnknownError


_classes: dict[tuple[Any, Any], Any] = {}


def _class_of_both(ours: Any, theirs: Any) -> Any:
    both = _classes.get((ours, theirs))
    if both is None:
        both = _classes[ours, theirs] = _made_class(ours, theirs)
    return both


def _made_class(ours: Any, theirs: Any) -> Any:
    def init(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
        # AutoGraph makes a new error from one that was raised during tracing, with the user's lines in its text.
        self.__dict__.update(theirs(node_def, op, message).__dict__)
        self.args = (message,)

    members = {
        "__module__": ours.__module__,
        "__doc__": ours.__doc__,
        "__init__": init,
        "__reduce__": _reduced,
    }
    return type(ours.__name__, (ours, theirs), members)


def _reduced(error: Any) -> Any:
    original = next(kind for kind in type(error).__mro__ if _is_plain(kind))
    return _rebuilt, (original, error.args, dict(error.__dict__))


def _is_plain(kind: type) -> bool:
    return issubclass(kind, HvdlabError) and not issubclass(kind, tf.errors.OpError)


def _rebuilt(original: type[HvdlabError], arguments: tuple[Any, ...], state: dict[str, Any]) -> HvdlabError:
    error = original.__new__(original, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return as_tensorflow(error)


def as_tensorflow(error: HvdlabError) -> HvdlabError:
    """Return the error as an instance of a class of TensorFlow's, too; the error itself if it is one already."""
    if issubclass(type(error), tf.errors.OpError):
        return error
    theirs = _tensorflow_class(error)
    both = _class_of_both(type(error), theirs)
    # Without the constructor, whose arguments are those of TensorFlow's errors.
    made = both.__new__(both, *error.args)
    made.args = error.args
    made.__dict__.update(error.__dict__)
    template = theirs(None, None, str(error))  # the attributes that it sets differ between releases
    made.__dict__.update(template.__dict__)
    found: HvdlabError = made
    return found


# -- through C++ ------------------------------------------------------------------------------------------------------


class _ErrorsInFlight:
    """Errors whose statuses are on their way through TensorFlow's C++, by the number in the status's text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        #: The errors by number, the oldest first; at most ``_MOST_IN_FLIGHT``, since C++ can drop a status unseen.
        self._errors: OrderedDict[int, BaseException] = OrderedDict()

    def add(self, error: BaseException) -> int:
        with self._lock:
            number = next(self._numbers)
            self._errors[number] = error
            if len(self._errors) > _MOST_IN_FLIGHT:
                self._errors.popitem(last=False)
            return number

    def find(self, text: str) -> BaseException | None:
        mark = _MARK.search(text)
        return None if mark is None else self._errors.get(int(mark[1]))


_in_flight = _ErrorsInFlight()


def to_status(error: BaseException) -> tuple[int, str]:
    """Return TensorFlow's code and text for an error. The text has a number by which :func:`from_text` finds the error again."""
    if isinstance(error, HvdlabError):
        error = as_tensorflow(error)
    code = getattr(error, "error_code", tf.errors.UNKNOWN)
    text = str(error) or type(error).__name__
    return int(code), f"{text} [hvdlab error {_in_flight.add(error)}]"


def from_text(text: str) -> BaseException | None:
    """Return the error that a text of TensorFlow's stands for: a kept one, or hvdlab's in place of XLA's; ``None`` for other texts."""
    error = _in_flight.find(text)
    if error is not None:
        return error.with_traceback(None)
    if "XLA" in text.upper() and _OUR_OPS.search(text):
        return as_tensorflow(UnsupportedError(JIT))
    return None


# -- where errors come back to Python --------------------------------------------------------------------------------


def install() -> None:
    """Patch TensorFlow so that it raises the errors of collectives, and not those that it makes from their statuses. Idempotent."""
    core, execute = internal("eager.core"), internal("eager.execute")
    session = internal("client.session").BaseSession
    if hasattr(core._status_to_exception, "__wrapped__"):
        return
    core._status_to_exception = _translating(core._status_to_exception)
    wrapped = _passing_on(execute.quick_execute)
    # With TensorFlow's op callbacks it is another function, which calls quick_execute() itself.
    if execute.execute is execute.quick_execute:
        execute.execute = wrapped
    execute.quick_execute = wrapped
    session._do_call = _passing_on(session._do_call)
    called_back = internal("ops.script_ops").FuncRegistry
    called_back.__call__ = _called_back(called_back.__call__)


def _called_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that calls the Python functions of a graph (``tf.py_function``), on threads that C++ has made.

    C++ keeps only the text of their errors. With this, collectives' errors and the ``BdbQuit`` of a debugger that the user has left
    come back as themselves; other errors become TensorFlow's, as without hvdlab. A trace function for all of Python's threads
    (``threading.settrace``), such as a debugger's, traces these functions, too.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace = threading.gettrace() if sys.gettrace() is None else None
        if trace is not None:
            sys.settrace(trace)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, HvdlabError | bdb.BdbQuit):
                raise
            raise tf.errors.UnknownError(None, None, to_status(error)[1]) from None
        finally:
            if trace is not None:
                sys.settrace(None)

    return call


def _translating(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def status_to_exception(status: Any) -> Any:
        found = from_text(status.message)
        return original(status) if found is None else found

    return status_to_exception


def _passing_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose errors C++ makes from statuses, so that it raises the kept errors, or ``KeyboardInterrupt``."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (tf.errors.OpError, RuntimeError) as error:
            if _INTERRUPTED in str(
                error
            ):  # pybind11's text after Ctrl-C while it made an exception from a status
                raise KeyboardInterrupt from None
            found = from_text(str(error))
            if found is None or found is error:
                raise
            raise found from None

    return call


# -- outside of functions ---------------------------------------------------------------------------------------------


def translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a public function so that its errors are TensorFlow's, too, and that AutoGraph does not rewrite it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (CollectiveError, InvalidRequestError) as error:
            raise as_tensorflow(error) from None

    public: Callable[..., Any] = tf.autograph.experimental.do_not_convert(call)
    return public

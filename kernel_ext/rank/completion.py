"""Completion, inspection, and the names of the user's variables on a rank.

Code of the user's may never return: :func:`bounded` and its like call it so that no thread waits for it for long.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from IPython.core.completer import Completion, IPCompleter, provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

from hvdlab.kernel_ext.rank.shell_setup import wire_bundle
from hvdlab.kernel_ext.wire.status import (
    Complete,
    Completions,
    EvaluateExpressions,
    ExpressionValues,
    Inspect,
    Inspection,
    UserNames,
)

T = TypeVar("T")


class TookTooLong(Exception):
    """The call did not return in time."""


class _Stop(BaseException):
    """Raised in the thread of a call that took too long."""


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Call ``work`` on a thread of its own and return what it returns. Raises what it raises, whatever that is.

    Raises:
        TookTooLong: It did not return within ``seconds``. It is stopped at its next line of Python, and again for as long as
            it goes on; a call into a library goes on until it returns.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            errors.append(error)
        finally:
            ended.set()

    # A thread for each call and no pool: a call that never returns would keep a worker of the pool for ever.
    thread = threading.Thread(target=run, name="hvdlab-looking", daemon=True)
    thread.start()
    try:
        # Not by join: an exception that is raised in it on this thread makes Python take the other one for ended.
        ended.wait(seconds)
    finally:  # a call that waits for another one is stopped together with it
        late = not ended.is_set()
        if late:
            threading.Thread(target=_stop, args=(thread, ended), name="hvdlab-stopping", daemon=True).start()
    if late:
        raise TookTooLong
    if errors:
        raise errors[0]
    return results[0]


def _stop(thread: threading.Thread, ended: threading.Event) -> None:
    """Raise ``_Stop`` in the thread until it ends, at growing distances."""
    # Once is not enough: Python drops an exception that comes while a finalizer runs, and the user's code may catch it.
    distance = 1.0
    while not ended.is_set():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
        ended.wait(distance)
        distance = min(2 * distance, LONGEST_DISTANCE)


LONGEST_DISTANCE = 60.0
"""Seconds between two attempts to stop a call that goes on."""

WITHIN = 5.0
"""Seconds after which an answer is given up while a cell runs."""


def while_busy(shell: Any, question: Complete | Inspect) -> Completions | Inspection:
    """Answer while a cell runs on the main thread. Not on the control thread: looking may run the user's code."""
    try:
        if isinstance(question, Complete):
            return bounded(lambda: complete(shell, question), WITHIN)
        return bounded(lambda: inspect(shell, question), WITHIN)
    except TookTooLong:
        if isinstance(question, Complete):
            return Completions(question.ticket, (), question.cursor, question.cursor)
        return Inspection(question.ticket, False, {})


def complete(shell: Any, request: Complete) -> Completions:
    """Return completions as IPython finds them; none if the search fails."""
    cursor = request.cursor
    completer = shell.Completer
    found = _completions(completer, request)
    if not found and completer.use_jedi:
        # Jedi finds nothing if it reads a file of its cache that another process is writing, or was killed while it wrote.
        completer.use_jedi = False
        try:
            found = _completions(completer, request)
        finally:
            completer.use_jedi = True
    if not found:
        return Completions(request.ticket, (), cursor, cursor)
    return Completions(
        request.ticket,
        tuple(c.text for c in found),
        found[0].start,
        found[0].end,
        tuple(c.type or "" for c in found),
    )


def _completions(completer: IPCompleter, request: Complete) -> list[Completion]:
    """Search with the completer as it is set now. Returns nothing if the search raises."""
    try:
        with provisionalcompleter():
            return list(
                rectify_completions(request.code, completer.completions(request.code, request.cursor))
            )
    except Exception:  # noqa: BLE001  # completion looks into objects of the user, whose __dir__ may raise
        return []


def inspect(shell: Any, request: Inspect) -> Inspection:
    """Return the documentation of the name at the cursor."""
    name = token_at_cursor(request.code, request.cursor)
    try:
        data = shell.object_inspect_mime(name, detail_level=request.detail)
    except KeyError:
        return Inspection(request.ticket, False, {})
    except Exception:  # noqa: BLE001  # a user's property or __getattr__ may raise anything
        return Inspection(request.ticket, False, {})
    return Inspection(request.ticket, True, wire_bundle(data))


def express(shell: Any, request: EvaluateExpressions) -> ExpressionValues:
    """Evaluate a client's expressions, as IPython does: an error is a result, too."""
    results = shell.user_expressions(request.expressions)
    return ExpressionValues(request.ticket, {name: wire_bundle(result) for name, result in results.items()})


MOST_NAMES = 500
"""Names of each kind that an answer has at most."""


def user_names(shell: Any, ticket: int) -> UserNames:
    """Return names of the user's variables and modules, in the order in which they were made. Any thread, also while a cell runs."""
    variables: list[str] = []
    modules: list[str] = []
    for name, value in user_items(shell):
        # isinstance() would ask the value for its `__class__`, which may be code of the user's; and this runs
        # on the control thread.
        (modules if issubclass(type(value), ModuleType) else variables).append(name)
    return UserNames(ticket, tuple(variables[:MOST_NAMES]), tuple(modules[:MOST_NAMES]))


def user_variables(shell: Any) -> list[tuple[str, Any]]:
    """Name and value of the user's variables, modules left out, in the same order."""
    return [(name, value) for name, value in user_items(shell) if not issubclass(type(value), ModuleType)][
        :MOST_NAMES
    ]


def user_items(shell: Any) -> list[tuple[str, Any]]:
    """Name and value of all that a user has made, modules included, in the same order."""
    hidden = shell.user_ns_hidden
    # A copy of the namespace, made in one go: the main thread may be changing it.
    # By identity, not by name: a user may bind one of the shell's own names, and expects to see it.
    return [
        (name, value)
        for name, value in list(shell.user_ns.items())
        if isinstance(name, str) and not name.startswith("_") and hidden.get(name, hidden) is not value
    ]

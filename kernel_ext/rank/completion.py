"""Completion and inspection from a rank's variables."""

from __future__ import annotations

from typing import Any

from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

from hvdlab.kernel_ext.inspect.bounded import TookTooLong, bounded
from hvdlab.kernel_ext.rank.display import wire_bundle
from hvdlab.kernel_ext.wire.status import Complete, Completions, Express, Expressed, Inspect, Inspection

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
    """Completions as IPython finds them; none if looking for them fails."""
    cursor = request.cursor
    try:
        with provisionalcompleter():
            found = list(rectify_completions(request.code, shell.Completer.completions(request.code, cursor)))
    except Exception:  # noqa: BLE001  # completion looks into objects of the user, whose __dir__ may raise
        found = []
    if not found:
        return Completions(request.ticket, (), cursor, cursor)
    return Completions(
        request.ticket,
        tuple(c.text for c in found),
        found[0].start,
        found[0].end,
        tuple(c.type or "" for c in found),
    )


def inspect(shell: Any, request: Inspect) -> Inspection:
    """Documentation of what stands at the cursor."""
    name = token_at_cursor(request.code, request.cursor)
    try:
        data = shell.object_inspect_mime(name, detail_level=request.detail)
    except KeyError:
        return Inspection(request.ticket, False, {})
    except Exception:  # noqa: BLE001  # a user's property or __getattr__ may raise anything
        return Inspection(request.ticket, False, {})
    return Inspection(request.ticket, True, wire_bundle(data))


def express(shell: Any, request: Express) -> Expressed:
    """Evaluate a client's expressions, as IPython does: an error is a result, too."""
    results = shell.user_expressions(request.expressions)
    return Expressed(request.ticket, {name: wire_bundle(result) for name, result in results.items()})

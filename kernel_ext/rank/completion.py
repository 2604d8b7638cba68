"""Completion and inspection from a rank's variables."""

from __future__ import annotations

from typing import Any

from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.utils.tokenutil import token_at_cursor

from hvdlab.kernel_ext.payloads import Complete, Completions, Inspect, Inspection
from hvdlab.kernel_ext.rank.display import wire_bundle


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

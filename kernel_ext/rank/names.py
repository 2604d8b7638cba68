"""Which variables a user has made on a rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hvdlab.kernel_ext.payloads import Names

MOST = 500
"""Names of each kind that are told."""


def user_names(shell: Any, ticket: int) -> Names:
    """In the order in which they were made. Any thread, also while a cell runs."""
    hidden = shell.user_ns_hidden
    variables: list[str] = []
    modules: list[str] = []
    # A copy, made in one go: the main thread may be at work on it.
    for name, value in list(shell.user_ns.items()):
        if not isinstance(name, str) or name.startswith("_") or hidden.get(name, hidden) is value:
            continue
        (modules if isinstance(value, ModuleType) else variables).append(name)
    return Names(ticket, tuple(variables[:MOST]), tuple(modules[:MOST]))

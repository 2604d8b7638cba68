"""Which variables a user has made on a rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hvdlab.kernel_ext.wire.status import Names

MOST = 500
"""Names of each kind that an answer has at most."""


def user_names(shell: Any, ticket: int) -> Names:
    """Names of the user's variables and modules, in the order in which they were made. Any thread, also while a cell runs."""
    variables: list[str] = []
    modules: list[str] = []
    for name, value in user_items(shell):
        (modules if issubclass(type(value), ModuleType) else variables).append(name)
    return Names(ticket, tuple(variables[:MOST]), tuple(modules[:MOST]))


def user_variables(shell: Any) -> list[tuple[str, Any]]:
    """Name and value of the user's variables, modules left out, in the same order."""
    return [(name, value) for name, value in user_items(shell) if not issubclass(type(value), ModuleType)][
        :MOST
    ]


def user_items(shell: Any) -> list[tuple[str, Any]]:
    """Name and value of all that a user has made, modules included, in the same order."""
    hidden = shell.user_ns_hidden
    # A copy of the namespace, made in one go: the main thread may be changing it.
    return [
        (name, value)
        for name, value in list(shell.user_ns.items())
        if isinstance(name, str) and not name.startswith("_") and hidden.get(name, hidden) is not value
    ]

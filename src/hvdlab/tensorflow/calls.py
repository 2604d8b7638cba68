"""The collective that an operation in a graph runs: fixed when the graph is made, and kept in an attribute of the operation."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from hvdlab.bindings.operations import Operation
from hvdlab.collectives.dtypes import OpKind, ReduceOp


class Call(NamedTuple):
    """A collective that an operation in a graph runs whenever it is executed.

    Attributes:
        operation: The collective.
        name: Its name; ``None`` if the ranks' calls are matched in order.
        grouped: Whether the tensors are a group, however many they are.
        site: The user's line of code that made the operation, for error texts and the timeline.
    """

    operation: Operation
    name: str | None
    grouped: bool
    site: str

    def encoded(self) -> bytes:
        """The call as the value of the operation's attribute."""
        operation = [*self.operation[:-1]]  # splits are an input
        return msgspec.json.encode([operation, self.name, self.grouped, self.site])


def decoded(value: bytes | str) -> Call:
    """The call in a value that :meth:`Call.encoded` made."""
    (kind, op, prescale, postscale, root, process_set), name, grouped, site = msgspec.json.decode(value)
    operation = Operation(OpKind(kind), ReduceOp(op), float(prescale), float(postscale), root, process_set)
    return Call(operation, name, grouped, site)

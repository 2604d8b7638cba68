"""What the kernel needs of the ranks. The magics provide it; the kernel loads them by the name of their extension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hvdlab.kernel_ext.spmd.wishes import Wishes
from hvdlab.kernel_ext.wire.status import Completions, Inspection


class RankSide(Protocol):
    """The ranks of a kernel. ``complete`` and ``inspect`` may be called from any thread."""

    def begin(self, wishes: Callable[[], Wishes]) -> None:
        """Begin to start ranks in the background; the first cell that needs them reports what can't be had."""
        ...

    def cell(self, code: str, *, store_history: bool) -> None:
        """The kernel is going to run this cell."""
        ...

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Completions from the first rank; None if it does not answer or there is none yet."""
        ...

    def inspect(self, code: str, cursor: int, detail: int) -> Inspection | None:
        """Documentation from the first rank; None if it does not answer or there is none yet."""
        ...

    def evaluate(self, expressions: Mapping[str, str]) -> dict[str, Any]:
        """Expressions of a client, as the protocol's ``user_expressions``, evaluated on the first rank."""
        ...

    def busy_with(self) -> str:
        """The label of a cell that the first rank runs; empty if it is idle or there is none."""
        ...

    def end(self) -> None:
        """The kernel ends: end the ranks, or leave them if they are kept. Any thread, also while a cell runs."""
        ...

"""Exceptions that make a notebook's cell fail the way its ranks did."""

from __future__ import annotations

from typing import TypeVar

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.output.error_report import report

F = TypeVar("F", bound=BaseException)


class CellFailed(HvdlabError):
    """A cell failed on at least one rank.

    It is raised as a subclass that bears the name of the root cause, so that tools which read only the name and text
    of an error (nbclient, papermill, test runners) see ``ValueError: bad`` as if the cell had run in the kernel.

    Attributes:
        results: Everything the ranks left behind.
    """

    def __init__(self, results: CellResults, *, colours: bool = True) -> None:
        self.results = results
        self._colours = colours
        cause = results.root_cause
        super().__init__(cause.evalue if cause is not None else "")

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of a traceback through our own frames."""
        return report(self.results, colours=self._colours)


class CellInterrupted(KeyboardInterrupt):
    """The user interrupted a cell. A KeyboardInterrupt, so that nothing but the top level catches it."""

    def __init__(self, results: CellResults, *, colours: bool = True) -> None:
        self.results = results
        self._colours = colours
        cause = results.root_cause
        super().__init__(cause.evalue if cause is not None else "")

    def _render_traceback_(self) -> list[str]:
        return report(self.results, colours=self._colours)


def failure_of(results: CellResults, *, colours: bool = True) -> CellFailed | CellInterrupted | None:
    """Return the exception to raise for these results, or None if all is well; ``colours`` is for the text that IPython shows."""
    cause = results.root_cause
    if cause is None:
        return None
    if results.interrupted and cause.ename == "KeyboardInterrupt":
        return _named(CellInterrupted, cause.ename)(results, colours=colours)
    return _named(CellFailed, cause.ename)(results, colours=colours)


def _named(base: type[F], name: str) -> type[F]:
    """Return a subclass under the name of the cause."""
    # type() would refuse a name with a NUL or half a character in it.
    found: type[F] = type(visible(name), (base,), {"__module__": base.__module__})  # pyright: ignore[reportAssignmentType]
    return found

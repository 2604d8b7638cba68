"""``%hvd_debug`` and ``%hvd_where``, and the hub by which the frontend's debugger reaches the ranks."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class

from hvdlab.kernel_ext.kernel.cell_routing import route
from hvdlab.magics.arguments import MagicParser, NotebookMagics, parse_ranks, takes_options
from hvdlab.magics.notebook_pool import NotebookPool, as_usage_error, ranks_of
from hvdlab.magics.run_magics import AutoRun

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.debugger.hub import DebugHub
    from hvdlab.kernel_ext.notebook.output.stack_text import RankLocations
    from hvdlab.kernel_ext.notebook.pool import Pool

_RANKS = re.compile(r"\s*%%hvd_(run|rank)\b")


def debug_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_debug",
        "Open a debugger where the last cell has failed, in the rank that failed first.",
        example="%hvd_debug 2",
    )
    parser.add_argument("rank", nargs="?", metavar="R", help="in this rank")
    return parser


def where_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_where",
        "Show where each rank is, also while it runs a cell in the background or hangs.",
        example="%hvd_where 2-3 --native",
    )
    parser.add_argument("ranks", nargs="?", metavar="0,2-3,::2", help="these ranks only")
    parser.add_argument("--native", action="store_true", help="the frames below Python, too, read by py-spy")
    return parser


@magics_class
class DebugMagics(NotebookMagics):
    """Magics that debug ranks and show where they are."""

    @line_magic
    @takes_options(debug_parser())
    def hvd_debug(self, options: argparse.Namespace) -> None:
        """Open a debugger over the frames of the error that the last cell has ended with."""
        pool = self.session.need_pool("%hvd_debug")
        rank = _one(options.rank, ranks_of(pool)) if options.rank is not None else None
        chosen = pool.first_to_fail if rank is None else rank
        if chosen is None:
            raise UsageError("%hvd_debug: no cell has failed; `%hvd_debug R` looks at rank R")
        if chosen not in ranks_of(pool):
            raise UsageError(
                f"%hvd_debug: rank {chosen}, which failed first, is gone; `%hvd_debug R` looks at another"
            )
        from hvdlab.kernel_ext.rank.debugger import HAS_FAILED, POST_MORTEM
        from hvdlab.magics.cell_view import run_cell

        with as_usage_error():
            # By an expression: a cell that goes well would have the rank drop the frames of the error.
            failed = pool.pull(HAS_FAILED, [chosen])[chosen]
        if not failed:
            raise UsageError(
                f"%hvd_debug: there is nothing to debug: the last cell of rank {chosen} did not fail, or hvdlab itself has raised its error"
            )
        print(f"rank {chosen}, where it failed; `q` leaves the debugger, and the variables stay as they are")
        how = argparse.Namespace(output="stream", out=None, background=False, timeout=None)
        run_cell(self.session, pool, POST_MORTEM, [chosen], how, 0)

    @line_magic
    @takes_options(where_parser())
    def hvd_where(self, options: argparse.Namespace) -> RankLocations | None:
        """Show the Python stack of each rank, equal ones together, and the collective it is in."""
        pool = self.session.need_pool("%hvd_where")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else None
        with as_usage_error():
            if options.native:
                print(pool.native(ranks))
            return pool.where(ranks)


def _one(text: str, ranks: list[int]) -> int:
    chosen = parse_ranks(text, ranks)
    if len(chosen) != 1:
        raise UsageError(f"%hvd_debug: one rank at a time, and {text!r} is {len(chosen)}")
    return chosen[0]


def load_debugger(session: NotebookPool, auto: AutoRun) -> DebugHub | None:
    """Put a hub before the kernel's own debugger, and return it; None if the kernel has no debugger."""
    kernel = getattr(session.shell, "kernel", None)
    if not hasattr(getattr(kernel, "debugger", None), "process_request"):
        return None
    from hvdlab.kernel_ext.notebook.debugger.hub import DebugHub

    hub = DebugHub(kernel, NotebookUnderDebug(session, auto))
    session.watchers.append(hub.pool_changed)
    session.debugger = hub
    return hub


def unload_debugger(session: NotebookPool) -> None:
    """Give the kernel its own debugger back."""
    hub, session.debugger = session.debugger, None
    if hub is not None:
        session.watchers.remove(hub.pool_changed)
        hub.close()


class NotebookUnderDebug:
    """Notebook as the debugger's hub knows it: its pool, and which cells run on the ranks.

    Args:
        session: Has the pool.
        auto: The transformer of ``%autohvd``.
    """

    def __init__(self, session: NotebookPool, auto: AutoRun) -> None:
        self._session, self._auto = session, auto

    @property
    def pool(self) -> Pool | None:
        """Return the notebook's pool, if it has one. Any thread."""
        # Without the check, which stops a pool that is broken: the hub asks on any thread.
        return self._session.pool_unchecked

    def runs_on_ranks(self, code: str) -> bool:
        """Return whether a cell runs on the ranks alone, and in no part in the kernel itself."""
        if self._session.ranks_by_default and not _RANKS.match(code):
            way = route(code)
            return bool(way.ranks) and not way.here
        return _RANKS.match("".join(self._auto(code.splitlines(keepends=True)))) is not None

"""``%hvd_debug``: a debugger where a cell has failed."""

from __future__ import annotations

import argparse

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, documented, parse_ranks
from hvdlab.magics.session import Session, as_usage_error, ranks_of


def debug_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_debug",
        "Look at what the last cell failed with, in the rank that failed first.",
    )
    parser.add_argument("rank", nargs="?", metavar="R", help="in this rank")
    return parser


@magics_class
class DebugMagics(Magics):
    """Magics that debug ranks."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(debug_parser())
    def hvd_debug(self, line: str) -> None:
        """Look at what the last cell failed with, in the rank that failed first."""
        parser = debug_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return
        pool = self.session.need_pool("%hvd_debug")
        rank = _one(options.rank, ranks_of(pool)) if options.rank is not None else None
        chosen = pool.first_to_fail if rank is None else rank
        if chosen is None:
            raise UsageError("%hvd_debug: no cell has failed; `%hvd_debug R` looks at rank R")
        if chosen not in ranks_of(pool):
            raise UsageError(
                f"%hvd_debug: rank {chosen}, which failed first, is gone; `%hvd_debug R` looks at another"
            )
        from hvdlab.kernel_ext.rank.pdb import HAS_FAILED, POST_MORTEM
        from hvdlab.magics.running import run_cell

        with as_usage_error():
            failed = pool.pull(HAS_FAILED, [chosen])[chosen]
        if not failed:
            raise UsageError(
                f"%hvd_debug: there is nothing to debug: the last cell of rank {chosen} did not fail, or hvdlab itself has raised its error"
            )
        print(f"rank {chosen}, where it failed; `q` leaves the debugger, and the variables stay as they are")
        how = argparse.Namespace(output="stream", out=None, background=False, timeout=None)
        run_cell(self.session, pool, POST_MORTEM, [chosen], how, 0)


def _one(text: str, ranks: list[int]) -> int:
    chosen = parse_ranks(text, ranks)
    if len(chosen) != 1:
        raise UsageError(f"%hvd_debug: one rank at a time, and {text!r} is {len(chosen)}")
    return chosen[0]

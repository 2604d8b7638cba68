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
        "Look at what the last cell failed with, in the rank that failed first; or let another debugger in.",
    )
    parser.add_argument("rank", nargs="?", metavar="R", help="in this rank")
    parser.add_argument(
        "--attach", action="store_true", help="open a port of this host to which a debugger can attach"
    )
    parser.add_argument("--detach", action="store_true", help="close it again")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="with --attach: this port")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="with --attach: one debugger after the other, until --detach; else the port closes once one has attached, "
        "or after ten minutes",
    )
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
        if options.attach or options.detach:
            from hvdlab.magics import attach

            if options.detach:
                attach.detach(self.session, rank)
            elif rank is None:
                raise UsageError("%hvd_debug --attach: which rank? `%hvd_debug --attach 2` is rank 2")
            else:
                attach.attach(self.session, rank, options.port, keep=options.keep)
            return
        chosen = pool.first_to_fail if rank is None else rank
        if chosen is None:
            raise UsageError("%hvd_debug: no cell has failed; `%hvd_debug R` looks at rank R")
        if chosen not in ranks_of(pool):
            raise UsageError(
                f"%hvd_debug: rank {chosen}, which failed first, is gone; `%hvd_debug R` looks at another"
            )
        from hvdlab.kernel_ext.rank.debugging import HAS_FAILED, POST_MORTEM
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

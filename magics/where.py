"""``%hvd_where``: where the ranks are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, documented, parse_ranks
from hvdlab.magics.session import Session, as_usage_error, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.output.stack_text import RankLocations


def where_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_where", "Show where each rank is, also while it runs a cell in the background or hangs."
    )
    parser.add_argument("ranks", nargs="?", metavar="0,2-3,::2", help="these ranks only")
    parser.add_argument("--native", action="store_true", help="the frames below Python, too, read by py-spy")
    return parser


@magics_class
class WhereMagics(Magics):
    """Magics that look at what ranks are doing."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(where_parser())
    def hvd_where(self, line: str) -> RankLocations | None:
        """Show the Python stack of each rank, equal ones together, and the collective it is in."""
        parser = where_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return None
        pool = self.session.need_pool("%hvd_where")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else None
        with as_usage_error():
            if options.native:
                print(pool.native(ranks))
            return pool.where(ranks)

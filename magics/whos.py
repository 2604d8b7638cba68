"""``%hvd_whos``: the variables of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, count_of, documented, parse_ranks
from hvdlab.magics.session import Session, as_usage_error, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.variables.overview import Overview, TensorTable


def whos_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_whos", "List the variables of all ranks and where they differ, also while a cell runs."
    )
    parser.add_argument("ranks", nargs="?", metavar="0,2-3,::2", help="these ranks only")
    parser.add_argument("--tensors", action="store_true", help="arrays and tensors, by memory")
    parser.add_argument(
        "-n", type=count_of("tensors"), default=20, metavar="N", help="with --tensors: how many (20)"
    )
    return parser


@magics_class
class WhosMagics(Magics):
    """Magics that list variables."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(whos_parser())
    def hvd_whos(self, line: str) -> Overview | TensorTable | None:
        """List the variables of all ranks, their sizes, and where they differ."""
        parser = whos_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return None
        pool = self.session.need_pool("%hvd_whos")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else None
        with as_usage_error():
            return pool.tensors(ranks, most=options.n) if options.tensors else pool.variables(ranks)

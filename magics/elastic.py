"""``%hvd_elastic``: the ranks that there are, since when, which are missing, and the history of their coming and going."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, count_of, documented
from hvdlab.magics.session import Session, as_usage_error
from hvdlab.widgets.membership_rows import membership_html, membership_text

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.membership_history import ElasticState

SHOWN = 20
"""Changes that are shown without ``--last``."""


def elastic_parser() -> MagicParser:
    parser = MagicParser("%hvd_elastic", "Show which ranks there are, and when others came and went.")
    parser.add_argument(
        "--last",
        type=count_of("changes"),
        default=SHOWN,
        metavar="N",
        help=f"show the last N changes (default: {SHOWN})",
    )
    return parser


@magics_class
class ElasticMagics(Magics):
    """The magic about ranks that come and go."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(elastic_parser())
    def hvd_elastic(self, line: str) -> ElasticView | None:
        """Show which ranks there are, and when others came and went."""
        parser = elastic_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return None
        pool = self.session.need_pool("%hvd_elastic")
        with as_usage_error():
            return ElasticView(pool.elastic(), options.last)


class ElasticView:
    """Two tables under a sentence; text in a terminal, HTML in a notebook.

    Args:
        state: What :meth:`Pool.elastic` returned.
        last: How many changes are shown.
    """

    def __init__(self, state: ElasticState, last: int = SHOWN) -> None:
        self.state, self._last = state, last

    def __repr__(self) -> str:
        return membership_text(self.state, self._last)

    def _repr_html_(self) -> str:
        return membership_html(self.state, self._last)

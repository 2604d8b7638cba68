"""``%hvd_elastic``: the ranks that there are, since when, who is awaited, and the history of their coming and going."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.visible import visible
from hvdlab.magics.arguments import MagicParser, count_of, documented
from hvdlab.magics.session import Session, as_usage_error

if TYPE_CHECKING:
    from hvdlab.kernel_ext.history import ElasticState

SHOWN = 20
"""Changes that are shown if nothing else is said."""

Rows = list[tuple[str, ...]]
MEMBERS = ("rank", "host", "pid", "state", "since", "by")
HISTORY = ("time", "rank", "change", "why", "host", "pid")


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

    @property
    def headline(self) -> str:
        """The world, who is awaited, and the elastic cells that run."""
        state = self.state
        there, wanted = len(state.members) - len(state.awaited), len(state.members)
        text = f"generation {state.generation}: {there} of {wanted} ranks are there"
        if state.awaited:
            text += f", {format_ranks(state.awaited)} {'is' if len(state.awaited) == 1 else 'are'} awaited"
        for label, bounds, ranks in state.cells:
            most = f", at most {bounds.at_most}" if bounds.at_most is not None else ""
            text += f"; cell {label} trains on {format_ranks(ranks)}, at least {bounds.at_least}{most}"
        return text

    def members(self) -> Rows:
        """A row of texts for each rank."""
        found: Rows = []
        for rank, state in sorted(self.state.members.items()):
            came = self.state.arrivals.get(rank)
            host, pid, since, by = (
                (came.host, came.pid, _clock(came.when), came.why) if came is not None else ("", 0, "", "")
            )
            found.append(_visible(str(rank), _plain(host), str(pid or ""), state, since, by))
        return found

    def history(self) -> Rows:
        """A row of texts for each of the last changes, oldest first."""
        return [
            _visible(_clock(c.when), str(c.rank), c.what, c.why, _plain(c.host), str(c.pid or ""))
            for c in self.state.history[-self._last :]
        ]

    def __repr__(self) -> str:
        earlier = len(self.state.history) - self._last
        more = f"\n({earlier} earlier changes: --last N shows more)" if earlier > 0 else ""
        return (
            f"{self.headline}\n\n{_text(MEMBERS, self.members())}\n\n{_text(HISTORY, self.history())}{more}"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.headline)}</p>{_html(MEMBERS, self.members())}{_html(HISTORY, self.history())}"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _plain(host: str) -> str:
    return host.split("#")[0]


def _visible(*texts: str) -> tuple[str, ...]:
    return tuple(visible(text, 300) for text in texts)


def _text(head: tuple[str, ...], rows: Rows) -> str:
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _html(head: tuple[str, ...], rows: Rows) -> str:
    def line(texts: tuple[str, ...], tag: str) -> str:
        return "".join(f'<{tag} style="text-align: left">{html.escape(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"

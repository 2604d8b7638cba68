"""``%hvd_metrics``: what the ranks measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, documented
from hvdlab.magics.session import Session

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.widgets.metrics import MetricsWidget


def metrics_parser() -> MagicParser:
    parser = MagicParser("%hvd_metrics", "Show what all ranks measure: metrics, time, lateness, CPU, memory.")
    parser.add_argument(
        "command",
        nargs="?",
        choices=("show", "table"),
        default="show",
        help="show (default): charts, live; table: all numbers as a pandas table",
    )
    return parser


@magics_class
class MetricsMagics(Magics):
    """Magics about metrics."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(metrics_parser())
    def hvd_metrics(self, line: str) -> MetricsWidget | DataFrame | None:
        """Show what all ranks measure, also while cells run in the background."""
        parser = metrics_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return None
        pool = self.session.need_pool("%hvd_metrics")
        if options.command == "table":
            return pool.metrics()
        return _shown(pool)


def _shown(pool: Any) -> MetricsWidget | None:
    """The widget; without the packages that it needs, print text."""
    try:
        from hvdlab.widgets.views import metrics

        return metrics(pool)
    except ModuleNotFoundError:
        from hvdlab.widgets.metrics_picture import as_text

        print(as_text(pool.client.recording))
        return None

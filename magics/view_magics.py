"""``%hvd_timeline``, ``%hvd_metrics`` and ``%hvd_elastic``: show, save or write to a file how the ranks are doing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import display

from hvdlab.magics.arguments import MagicParser, count_of, documented
from hvdlab.magics.notebook_pool import NotebookPool, as_usage_error
from hvdlab.widgets.pool_membership import membership_html, membership_text

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.kernel_ext.notebook.membership_history import ElasticState
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.widgets.metrics import MetricsWidget

VIEWER = "https://ui.perfetto.dev"
COMMANDS = {
    "show": "the ranks' collectives in a live view",
    "save": "write what was recorded so far to FILE (.json or .json.gz)",
    "clear": "forget the collectives that were recorded so far",
    "start": "from now on write what all ranks do to FILE (.json)",
    "stop": "complete that file",
    "status": "say which file is being written (default)",
}
WITH_FILE = ("save", "start")


def timeline_parser() -> MagicParser:
    parser = MagicParser("%hvd_timeline", f"Show, save or write what all ranks do; {VIEWER} opens the files.")
    text = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), default="status", help=text)
    parser.add_argument("file", nargs="?", metavar="FILE", help="for save and start: the file to write")
    return parser


@magics_class
class TimelineMagics(Magics):
    """Magics about the timeline."""

    def __init__(self, session: NotebookPool) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(timeline_parser())
    def hvd_timeline(self, line: str) -> None:
        """Show what all ranks do, or write it to a file, also while cells run in the background."""
        parser = timeline_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return
        command: str = options.command
        file: str = options.file or ""
        if file and command not in WITH_FILE:
            parser.error(f"`{command}` takes no file, but got `{file}`")
        magic = "%hvd_timeline" + (f" {command}" if command != "status" else "")
        if command in WITH_FILE and not file:
            example = "run.json.gz" if command == "save" else "run.json"
            raise UsageError(f"{magic}: say which file to write, as in `{magic} {example}`")
        pool = self.session.need_pool(magic)
        with as_usage_error():
            if command == "show":
                self._show(pool)
            elif command == "save":
                self._save(pool, file)
            elif command == "clear":
                self._clear(pool)
            elif command == "start":
                self._start(pool, file)
            elif command == "stop":
                self._stop(pool)
            else:
                path = pool.timeline
                print(f"a timeline is being written to {path}" if path else "no timeline is being written")

    def _show(self, pool: Pool) -> None:
        from hvdlab.widgets.views import timeline

        try:
            display(timeline(pool))  # type: ignore[no-untyped-call]  # IPython has no types for it
        except ModuleNotFoundError as error:
            raise UsageError(f"%hvd_timeline show: {error}") from None

    def _save(self, pool: Pool, file: str) -> None:
        try:
            path = pool.save_trace(os.path.expanduser(file))
        except OSError as error:
            raise UsageError(f"%hvd_timeline save: {file} can't be written: {error.strerror}") from None
        _say_written(path)

    def _clear(self, pool: Pool) -> None:
        count = pool.client.recording.clear()
        print(f"forgot {count:,} spans; what comes from now on is kept")

    def _start(self, pool: Pool, file: str) -> None:
        try:
            path = pool.start_timeline(os.path.expanduser(file))
        except OSError as error:
            raise UsageError(f"%hvd_timeline start: {file} can't be written: {error.strerror}") from None
        print(f"writing a timeline to {path}; `%hvd_timeline stop` completes it")

    def _stop(self, pool: Pool) -> None:
        path = pool.stop_timeline()
        if path is None:
            raise UsageError(
                "%hvd_timeline stop: no timeline is being written; `%hvd_timeline start FILE` begins one"
            )
        _say_written(path)


def _say_written(path: Path) -> None:
    print(f"wrote {path} ({_size(path.stat().st_size)}); {VIEWER} opens it")


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


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

    def __init__(self, session: NotebookPool) -> None:
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
        from hvdlab.widgets.still_charts import as_text

        print(as_text(pool.client.recording))
        return None


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

    def __init__(self, session: NotebookPool) -> None:
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

"""``%hvd_timeline``, ``%hvd_metrics``, ``%hvd_elastic`` and ``%hvd_output``: show or save the activity and the output of ranks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class
from IPython.display import display

from hvdlab.magics.arguments import OUTPUTS, MagicParser, NotebookMagics, count_of, parse_ranks, takes_options
from hvdlab.magics.notebook_pool import as_usage_error, shell_colours

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
    from hvdlab.kernel_ext.notebook.membership import ElasticState
    from hvdlab.kernel_ext.notebook.output.transcript import CellRecorder, Ending, Transcript
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
SHOWN = 20
"""Changes that are shown without ``--last``."""


def timeline_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_timeline",
        f"Show, save or write what all ranks do; {VIEWER} opens the files.",
        example="%hvd_timeline save run.json.gz",
    )
    text = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), default="status", help=text)
    parser.add_argument("file", nargs="?", metavar="FILE", help="for save and start: the file to write")
    return parser


def metrics_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_metrics",
        "Show what all ranks measure: metrics, time, lateness, CPU, memory.",
        example="%hvd_metrics table",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("show", "table"),
        default="show",
        help="show (default): charts, live; table: all numbers as a pandas table",
    )
    return parser


def elastic_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_elastic",
        "Show which ranks there are, and when others came and went.",
        example="%hvd_elastic --last 50",
    )
    parser.add_argument(
        "--last",
        type=count_of("changes"),
        default=SHOWN,
        metavar="N",
        help=f"show the last N changes (default: {SHOWN})",
    )
    return parser


@magics_class
class ViewMagics(NotebookMagics):
    """Magics that show the ranks' collectives, metrics and membership."""

    @line_magic
    @takes_options(timeline_parser())
    def hvd_timeline(self, options: argparse.Namespace) -> None:
        """Show the timeline of all ranks, or write it to a file, also while cells run in the background."""
        command: str = options.command
        file: str = options.file or ""
        if file and command not in WITH_FILE:
            raise UsageError(f"%hvd_timeline: `{command}` takes no file, but got `{file}`")
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
            display(timeline(pool))
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

    @line_magic
    @takes_options(metrics_parser())
    def hvd_metrics(self, options: argparse.Namespace) -> MetricsWidget | DataFrame | None:
        """Show the metrics of all ranks, also while cells run in the background."""
        pool = self.session.need_pool("%hvd_metrics")
        if options.command == "table":
            return pool.metrics()
        return _shown(pool)

    @line_magic
    @takes_options(elastic_parser())
    def hvd_elastic(self, options: argparse.Namespace) -> ElasticView | None:
        """Show which ranks there are, and when others came and went."""
        pool = self.session.need_pool("%hvd_elastic")
        with as_usage_error():
            return ElasticView(pool.elastic(), options.last)


def _say_written(path: Path) -> None:
    print(f"wrote {path} ({_size(path.stat().st_size)}); {VIEWER} opens it")


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _shown(pool: Any) -> MetricsWidget | None:
    """Return the widget; without the packages that it needs, print text."""
    try:
        from hvdlab.widgets.views import metrics

        return metrics(pool)
    except ModuleNotFoundError:
        from hvdlab.widgets.still_charts import as_text

        print(as_text(pool.client.recording))
        return None


class ElasticView:
    """Tables of the ranks and of their history, under a sentence: text in a terminal, HTML in a notebook.

    Args:
        state: The state, as :meth:`Pool.elastic` returns it.
        last: Number of changes to show.
    """

    def __init__(self, state: ElasticState, last: int = SHOWN) -> None:
        self.state, self._last = state, last

    def __repr__(self) -> str:
        from hvdlab.widgets.pool_membership import membership_text

        return membership_text(self.state, self._last)

    def _repr_html_(self) -> str:
        from hvdlab.widgets.pool_membership import membership_html

        return membership_html(self.state, self._last)


def output_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_output",
        "Show the output of a cell again, with its values or its error; of a cell that runs, its further output follows.",
        example="%hvd_output 7 --ranks 3 --tail 20",
    )
    parser.add_argument(
        "cell", nargs="?", default="", metavar="CELL", help="its number, such as 7 (default: the last one)"
    )
    parser.add_argument("--ranks", metavar="0,2-3,::2", help="of these ranks only")
    parser.add_argument("--tail", type=count_of("lines"), metavar="N", help="the last N lines of each rank")
    parser.add_argument(
        "--to", metavar="FILE", help="write all of it to a file, also what is too much to show"
    )
    parser.add_argument(
        "--output", choices=OUTPUTS[:2], default="grouped", help="how it is arranged (default: grouped)"
    )
    return parser


@magics_class
class OutputMagics(NotebookMagics):
    """Magic that shows output again."""

    @line_magic
    @takes_options(output_parser())
    def hvd_output(self, options: argparse.Namespace) -> None:
        """Show the output of a cell again."""
        pool = self.session.need_pool("%hvd_output")
        recorder = pool.transcripts.find(options.cell)
        if recorder is None:
            raise UsageError(
                f"%hvd_output: cell {options.cell} has not run on these ranks, or is too long ago to be kept"
                if options.cell
                else "%hvd_output: there is no output yet: no cell has run on these ranks"
            )
        ranks = list(recorder.transcript.ranks)
        if options.ranks:
            ranks = parse_ranks(options.ranks, ranks)
        with as_usage_error():
            self._show(recorder, ranks, options)

    def _show(self, recorder: CellRecorder, ranks: list[int], options: argparse.Namespace) -> None:
        from hvdlab.kernel_ext.notebook.cells.sink import drain
        from hvdlab.kernel_ext.notebook.output.transcript import last_lines, write_text

        transcript = recorder.transcript
        if options.to:
            path = Path(options.to).expanduser()
            size = write_text(transcript, path, ranks, merge=options.output == "grouped")
            print(f"{size:,} bytes written to {path}")
            self._print_lost(transcript)
        elif options.tail:
            for rank, text in last_lines(transcript, ranks, options.tail).items():
                print(f"── rank {rank} ──\n{text}".rstrip("\n"))
        else:
            sinks = self._sinks(ranks, options, background=transcript.running)
            # Not by `running`: a cell may have ended since, and then its driver shows these sinks nothing.
            if not recorder.attach(sinks, ranks):
                for sink in sinks:
                    drain(sink)
                self._print_lost(transcript)
                self._end(transcript.ending)

    def _sinks(
        self, ranks: list[int], options: argparse.Namespace, *, background: bool
    ) -> tuple[OutputSink, ...]:
        from hvdlab.magics.cell_view import make_sinks

        return make_sinks(self.session, ranks, options.output, background=background)

    def _print_lost(self, transcript: Transcript) -> None:
        if transcript.lost:
            print(f"{transcript.lost:,} bytes after this were not kept: {transcript.why}", file=sys.stderr)

    def _end(self, ending: Ending | None) -> None:
        if ending is None:
            return
        if ending.report:
            lines = ending.report if shell_colours(self.session.shell) else ending.plain_report
            print("\n".join(lines), file=sys.stderr)
        elif ending.values is not None:
            publish: Any = self.session.shell.display_pub.publish
            publish(dict(ending.values), {})

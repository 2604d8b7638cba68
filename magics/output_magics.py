"""``%hvd_output``: show the output of an earlier cell again, or write it to a file."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import OUTPUTS, MagicParser, count_of, documented, parse_ranks
from hvdlab.magics.notebook_pool import NotebookPool, as_usage_error, shell_colours

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
    from hvdlab.kernel_ext.notebook.output.recorder import CellRecorder
    from hvdlab.kernel_ext.notebook.output.transcript import Ending, Transcript


def output_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_output",
        "Show again what a cell wrote, with its values or its error; of one that runs also what it writes from now on.",
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
class OutputMagics(Magics):
    """The magic that shows output again."""

    def __init__(self, session: NotebookPool) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(output_parser())
    def hvd_output(self, line: str) -> None:
        """Show again what a cell wrote."""
        parser = output_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return
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
        from hvdlab.kernel_ext.notebook.output.export import last_lines, write_text

        transcript = recorder.transcript
        if options.to:
            path = Path(options.to).expanduser()
            size = write_text(transcript, path, ranks, merge=options.output == "grouped")
            print(f"{size:,} bytes written to {path}")
            self._tell_lost(transcript)
        elif options.tail:
            for rank, text in last_lines(transcript, ranks, options.tail).items():
                print(f"── rank {rank} ──\n{text}".rstrip("\n"))
        elif transcript.running:
            recorder.attach(self._sink(ranks, options, background=True), ranks)
        else:
            sink = self._sink(ranks, options, background=False)
            recorder.attach(sink, ranks)
            drain(sink)
            self._tell_lost(transcript)
            self._end(transcript.ending)

    def _sink(self, ranks: list[int], options: argparse.Namespace, *, background: bool) -> OutputSink:
        from hvdlab.magics.cell_view import make_sink

        return make_sink(self.session, ranks, options.output, background=background)

    def _tell_lost(self, transcript: Transcript) -> None:
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


def drain(sink: OutputSink) -> None:
    """Show what a sink holds back, at its pace; an interrupt ends that."""
    from hvdlab.kernel_ext.notebook.cells.sink import TimedSink

    if not isinstance(sink, TimedSink):
        return
    while (at := sink.tick(time.monotonic())) is not None:
        time.sleep(max(0.0, at - time.monotonic()))

"""``%hvd_timeline``: what the ranks do, written to a file."""

from __future__ import annotations

import os

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, documented
from hvdlab.magics.session import Session, as_usage_error

VIEWER = "https://ui.perfetto.dev"


def timeline_parser() -> MagicParser:
    parser = MagicParser("%hvd_timeline", f"Write what all ranks do to a Chrome trace, which {VIEWER} opens.")
    parser.add_argument("command", nargs="?", choices=("start", "stop", "status"), default="status")
    parser.add_argument("file", nargs="?", metavar="FILE", help="for start: the file to write")
    return parser


@magics_class
class TimelineMagics(Magics):
    """Magics about the timeline."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(timeline_parser())
    def hvd_timeline(self, line: str) -> None:
        """Write what all ranks do to a file, also while cells run in the background."""
        parser = timeline_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
        elif options.command == "start":
            self._start(options.file)
        elif options.file is not None:
            parser.error(f"`{options.command}` takes no file, but got `{options.file}`")
        elif options.command == "stop":
            self._stop()
        else:
            path = self.session.need_pool("%hvd_timeline").timeline
            print(f"a timeline is being written to {path}" if path else "no timeline is being written")

    def _start(self, file: str | None) -> None:
        if file is None:
            raise UsageError(
                "%hvd_timeline start: say which file to write, as in `%hvd_timeline start run.json`"
            )
        pool = self.session.need_pool("%hvd_timeline start")
        with as_usage_error():
            try:
                path = pool.start_timeline(os.path.expanduser(file))
            except OSError as error:
                raise UsageError(f"%hvd_timeline start: {file} can't be written: {error.strerror}") from None
        print(f"writing a timeline to {path}; `%hvd_timeline stop` completes it")

    def _stop(self) -> None:
        pool = self.session.need_pool("%hvd_timeline stop")
        with as_usage_error():
            path = pool.stop_timeline()
        if path is None:
            raise UsageError(
                "%hvd_timeline stop: no timeline is being written; `%hvd_timeline start FILE` begins one"
            )
        print(f"wrote {path} ({_size(path.stat().st_size)}); {VIEWER} opens it")


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"

"""``%hvd_pool``: the pool by hand."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.collectives.errors import HvdlabError, format_ranks
from hvdlab.collectives.text import visible_lines
from hvdlab.kernel_ext.notebook.unsynced import missing_names_notice, restarted_notice
from hvdlab.magics.arguments import MagicParser, add_pool_options, count_of, documented, parse_ranks, positive
from hvdlab.magics.running import make_sink
from hvdlab.magics.session import Session, as_usage_error, ranks_of, say_ranks
from hvdlab.magics.status_table import StatusTable, StoryTable

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.kernel_ext.notebook.takeover import OrphanedCell

COMMANDS = ("start", "status", "resize", "repair", "restart", "sync", "stop", "attach", "detach", "list")
WITH_ARGUMENT = ("start", "resize", "restart", "sync", "attach")
OF_SYNC = {"source": "--from", "without": "--without"}
OF_STORY = {"rank": "--rank", "name": "--name", "last": "--last"}
STORY_ENTRIES = 20
"""Decisions that `status --story` shows, apart from their causes."""


def pool_parser() -> MagicParser:
    parser = MagicParser("%hvd_pool", "Start, look at, resize, repair or stop the ranks.")
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="status", help="(default: status)")
    parser.add_argument(
        "argument",
        nargs="?",
        metavar="N|RANKS|NAME",
        help="for resize: number of ranks; for restart and sync: ranks; for attach: a pool's name",
    )
    add_pool_options(parser)
    parser.add_argument("--from", dest="source", type=int, metavar="R", help="for sync: the rank that knows")
    parser.add_argument(
        "--without",
        action="append",
        metavar="NAME",
        help="for sync: leave this variable out; may be repeated",
    )
    parser.add_argument(
        "--keep",
        nargs="?",
        const="",
        metavar="NAME",
        help="for start: the ranks outlive the notebook; `attach NAME` in another one finds them",
    )
    parser.add_argument(
        "--story",
        action="store_true",
        help="for status: the coordinator's newest decisions, and their causes",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="for status --story: about this rank")
    parser.add_argument("--name", metavar="TENSOR", help="for status --story: about this tensor")
    parser.add_argument(
        "--last",
        type=count_of("decisions"),
        metavar="N",
        help=f"for status --story: how many (default: {STORY_ENTRIES})",
    )
    return parser


@magics_class
class PoolMagics(Magics):
    """Magics about the pool."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(pool_parser())
    def hvd_pool(self, line: str) -> Any:
        """Start, look at, resize, repair or stop the ranks."""
        parser = pool_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return None
        if options.argument is not None and options.command not in WITH_ARGUMENT:
            parser.error(f"`{options.command}` takes no argument, but got `{options.argument}`")
        if options.keep is not None and options.command != "start":
            parser.error(f"--keep belongs to `start`, not to `{options.command}`")
        if options.story and options.command != "status":
            parser.error(f"--story belongs to `status`, not to `{options.command}`")
        for name, option in OF_STORY.items():
            if getattr(options, name) is not None and not options.story:
                parser.error(f"{option} belongs to `status --story`")
        for name, option in OF_SYNC.items():
            if getattr(options, name) is not None and options.command != "sync":
                parser.error(f"{option} belongs to `sync`, not to `{options.command}`")
        command: Callable[[Any], Any] = getattr(self, f"_{options.command}")
        return command(options)

    def _start(self, options: Any) -> None:
        np = options.np if options.argument is None else _number("start", options.argument)
        pool = self.session.pool_for(
            np,
            launcher=options.launcher,
            plane=options.plane,
            hosts=options.hosts,
            launcher_options=options.launcher_option,
            keep=options.keep,
            new=True,
        )
        kept = f"; `%hvd_pool attach {pool.name}` in another notebook finds them" if pool.name else ""
        print(_ready(pool) + kept)

    def _status(self, options: Any) -> StatusTable | StoryTable:
        pool = self.session.need_pool("%hvd_pool status")
        if options.story:
            return self._story(pool, options)
        with as_usage_error():
            return StatusTable(pool.status(), self.session.labels)

    def _story(self, pool: Pool, options: Any) -> StoryTable:
        try:
            found = pool.story(options.last or STORY_ENTRIES, rank=options.rank, name=options.name or "")
        except (HvdlabError, TimeoutError) as error:
            raise UsageError(f"%hvd_pool status --story: {error}") from error
        return StoryTable(found)

    def _resize(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool resize")
        if options.argument is None and options.np is None:
            raise UsageError(
                "%hvd_pool resize: say how many ranks there shall be, as in `%hvd_pool resize 4`"
            )
        np = options.np if options.argument is None else _number("resize", options.argument)
        for line in self.session.resize(pool, np):
            print(line)
        print(_ready(pool))
        if new := self.session.greet(pool):
            print(new)

    def _repair(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool repair")
        begin = time.monotonic()
        with as_usage_error():
            replaced = pool.repair()
            seconds = time.monotonic() - begin
            lacks = {} if self.session.ranks_by_default or not pool.newcomers else pool.names()
            print(restarted_notice(lacks, replaced, seconds) if replaced else "no rank is missing")
        if self.session.ranks_by_default and (new := self.session.greet(pool)):
            print(new)

    def _restart(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool restart")
        everyone = list(range(pool.size))
        ranks = everyone if options.argument is None else parse_ranks(options.argument, everyone)
        with as_usage_error():
            pool.restart(ranks)
            known = self.session.ranks_by_default or not set(ranks) & set(pool.newcomers)
            lacks = "" if known else missing_names_notice(pool.names(), ranks)
        print(f"{say_ranks(ranks)} started again, with empty memory" + (f"; {lacks}" if lacks else ""))
        if self.session.ranks_by_default and (new := self.session.greet(pool)):
            print(new)

    def _sync(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool sync")
        ranks = None if options.argument is None else parse_ranks(options.argument, ranks_of(pool))
        with as_usage_error():
            print(pool.sync(ranks, source=options.source, without=options.without or ()))

    def _stop(self, options: Any) -> None:
        pool = self.session.pool
        if pool is None:
            print("no ranks are running")
            return
        pool.stop()
        print("all ranks have ended")

    def _attach(self, options: Any) -> None:
        with as_usage_error():
            name = options.argument or _only_pool(options.launcher)
        pool = self.session.attach(name, self._show_left, options.launcher)
        for text in pool.news():
            print(visible_lines(text))
        self.session.labels.update({run.cell: run.label for run in pool.resumed})
        print(_ready(pool, ", with all variables"))
        busy = [status.rank for status in pool.status() if status.state.partition(",")[0] == "running"]
        if busy:
            verb = "runs" if len(busy) == 1 else "run"
            print(
                f"{say_ranks(busy)} still {verb} a cell of the notebook before; the next cell comes after it"
            )

    def _show_left(self, left: OrphanedCell) -> OutputSink:
        """The sink for a cell that the notebook before has left: its output is shown under the cell that runs now."""
        from hvdlab.kernel_ext.notebook.takeover import INTERRUPTED

        does = "trains" if left.order is not None else "runs"
        cell = f"cell {left.label or left.cell}"
        if left.interrupted:
            print(f"{cell} {INTERRUPTED}")
        state = f"still {does} on {format_ranks(left.running)}" if left.running else "has ended"
        print(f"{cell} of the notebook before {state}; what it wrote meanwhile follows")
        return make_sink(self.session, left.ranks, "grouped", background=True)

    def _detach(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool detach")
        with as_usage_error():
            pool.detach()
        print(f"the ranks stay; `%hvd_pool attach {pool.name}` finds them")

    def _list(self, options: Any) -> None:
        from hvdlab.kernel_ext.notebook.kept_pools import kept_elsewhere
        from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry, table

        with as_usage_error():
            elsewhere, problems = kept_elsewhere(options.launcher)
            print("\n".join([table(KeptPoolRegistry().all(), elsewhere), *problems]))


def _only_pool(launcher: str | None) -> str:
    """The name of the only kept pool, or the only one of a launcher; ``UsageError`` if there is none, or more than one."""
    from hvdlab.kernel_ext.notebook.kept_pools import kept_elsewhere
    from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry

    here = [kept.name for kept in KeptPoolRegistry().all()] if launcher in (None, "local") else []
    names = [*here, *(job.name for job in kept_elsewhere(launcher)[0])]
    if len(names) == 1:
        return names[0]
    raise UsageError(
        f"%hvd_pool attach: say which one, {' or '.join(f'`{name}`' for name in names)}"
        if names
        else "%hvd_pool attach: no pool is kept; `%hvd_pool start --keep NAME` starts one"
    )


def _ready(pool: Pool, how: str = "") -> str:
    """``rank 0 is ready``, of the ranks that live; a clause names those that are lost."""
    ranks = ranks_of(pool)
    lost = format_ranks(list(pool.lost))
    also = (
        f"; {lost} {'is' if len(pool.lost) == 1 else 'are'} lost, `%hvd_pool repair` replaces them"
        if pool.lost
        else ""
    )
    ready = (
        f"{say_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} ready{how}" if ranks else "no rank lives"
    )
    return ready + also


def _number(command: str, text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"%hvd_pool {command}: {error}") from None

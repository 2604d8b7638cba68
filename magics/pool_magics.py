"""``%hvd_pool``, its status table, and ``%hvd_c10d``: start, inspect, change and stop the ranks by hand."""

from __future__ import annotations

import argparse
import html
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import format_ranks, visible, visible_lines
from hvdlab.magics.arguments import (
    MagicParser,
    NotebookMagics,
    add_pool_options,
    count_of,
    parse_ranks,
    positive,
    takes_options,
)
from hvdlab.magics.notebook_pool import as_usage_error, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.cells.sink import Sinks
    from hvdlab.kernel_ext.notebook.kept_pools import OrphanedCell
    from hvdlab.kernel_ext.notebook.pool import Pool

COMMANDS = ("start", "status", "resize", "repair", "restart", "sync", "stop", "attach", "detach", "list")
_C10D = "HVDLAB_C10D"
"""Variable by which ranks choose whose groups `init_process_group()` makes."""
WITH_ARGUMENT = ("start", "resize", "restart", "sync", "attach")
OF_SYNC = {"source": "--from", "without": "--without"}
OF_STORY = {"rank": "--rank", "name": "--name", "last": "--last"}
STORY_ENTRIES = 20
"""Decisions that `status --story` shows, apart from their causes."""


def pool_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_pool", "Start, look at, resize, repair or stop the ranks.", example="%hvd_pool start -np 8"
    )
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


def c10d_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_c10d",
        "Choose whose groups torch.distributed makes in the ranks for CPU tensors, or show the choice.",
        example="%hvd_c10d on",
    )
    parser.add_argument(
        "switch", nargs="?", type=str.lower, choices=("on", "off"), help="on: hvdlab's; off: torch's own"
    )
    return parser


@magics_class
class PoolMagics(NotebookMagics):
    """Magics that start, inspect, change and stop the ranks."""

    @line_magic
    @takes_options(pool_parser())
    def hvd_pool(self, options: argparse.Namespace) -> Any:
        """Start, look at, resize, repair or stop the ranks."""
        if options.argument is not None and options.command not in WITH_ARGUMENT:
            raise UsageError(
                f"%hvd_pool: `{options.command}` takes no argument, but got `{options.argument}`"
            )
        if options.keep is not None and options.command != "start":
            raise UsageError(f"%hvd_pool: --keep belongs to `start`, not to `{options.command}`")
        if options.story and options.command != "status":
            raise UsageError(f"%hvd_pool: --story belongs to `status`, not to `{options.command}`")
        for name, option in OF_STORY.items():
            if getattr(options, name) is not None and not options.story:
                raise UsageError(f"%hvd_pool: {option} belongs to `status --story`")
        for name, option in OF_SYNC.items():
            if getattr(options, name) is not None and options.command != "sync":
                raise UsageError(f"%hvd_pool: {option} belongs to `sync`, not to `{options.command}`")
        command: Callable[[Any], Any] = getattr(self, f"_{options.command}")
        return command(options)

    @line_magic
    @takes_options(c10d_parser())
    def hvd_c10d(self, options: argparse.Namespace) -> None:
        """Let groups of torch.distributed for CPU tensors be hvdlab's in all ranks, or torch's own."""
        if options.switch:
            value = "1" if options.switch == "on" else "0"
            os.environ[_C10D] = value  # ranks that are started later have it from here
            pool = self.session.pool
            if pool is not None and pool.ranks:
                with as_usage_error():
                    pool.run(f"import os as _os; _os.environ[{_C10D!r}] = {value!r}; del _os")
        if os.environ.get(_C10D, "0") == "1":
            print(
                'torch.distributed: init_process_group() and init_process_group("gloo") make groups of hvdlab\'s in the ranks'
            )
        else:
            print(
                "torch.distributed: init_process_group(\"hvdlab\") makes groups of hvdlab's; others are torch's own"
            )

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
            raise UsageError("%hvd_pool resize: say how many ranks to have, as in `%hvd_pool resize 4`")
        np = options.np if options.argument is None else _number("resize", options.argument)
        for line in self.session.resize(pool, np):
            print(line)
        print(_ready(pool))
        if new := self.session.unsynced_notice(pool):
            print(new)

    def _repair(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool repair")
        from hvdlab.kernel_ext.notebook.elastic import restarted_notice

        begin = time.monotonic()
        with as_usage_error():
            replaced = pool.repair()
            seconds = time.monotonic() - begin
            lacks = {} if self.session.ranks_by_default or not pool.newcomers else pool.names()
            print(restarted_notice(lacks, replaced, seconds) if replaced else "no rank is missing")
        if self.session.ranks_by_default and (new := self.session.unsynced_notice(pool)):
            print(new)

    def _restart(self, options: Any) -> None:
        pool = self.session.need_pool("%hvd_pool restart")
        from hvdlab.kernel_ext.notebook.elastic import missing_names_notice

        # Not the ranks that live: a lost one can be started again as well.
        everyone = list(range(pool.size))
        ranks = everyone if options.argument is None else parse_ranks(options.argument, everyone)
        with as_usage_error():
            pool.restart(ranks)
            known = self.session.ranks_by_default or not set(ranks) & set(pool.newcomers)
            lacks = "" if known else missing_names_notice(pool.names(), ranks)
        print(f"{format_ranks(ranks)} started again, with empty memory" + (f"; {lacks}" if lacks else ""))
        if self.session.ranks_by_default and (new := self.session.unsynced_notice(pool)):
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
                f"{format_ranks(busy)} still {verb} a cell of the notebook before; the next cell comes after it"
            )

    def _show_left(self, left: OrphanedCell) -> Sinks:
        """Return the sinks for a cell that the notebook before has left: its output is shown under the cell that runs now."""
        from hvdlab.kernel_ext.notebook.kept_pools import INTERRUPTED
        from hvdlab.magics.cell_view import make_sinks

        does = "trains" if left.order is not None else "runs"
        cell = f"cell {left.label or left.cell}"
        if left.interrupted:
            print(f"{cell} {INTERRUPTED}")
        state = f"still {does} on {format_ranks(left.running)}" if left.running else "has ended"
        print(f"{cell} of the notebook before {state}; what it wrote meanwhile follows")
        return make_sinks(self.session, left.ranks, "grouped", background=True)

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
    """Return the name of the only kept pool, or the only one of a launcher.

    Raises:
        UsageError: There is none, or more than one.
    """
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
    """Return ``rank 0 is ready``, of the ranks that live; a clause names those that are lost."""
    ranks = ranks_of(pool)
    lost = format_ranks(list(pool.lost))
    fate = (
        "is lost, `%hvd_pool repair` replaces it"
        if len(pool.lost) == 1
        else "are lost, `%hvd_pool repair` replaces them"
    )
    also = f"; {lost} {fate}" if pool.lost else ""
    ready = (
        f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} ready{how}" if ranks else "no rank lives"
    )
    return ready + also


def _number(command: str, text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"%hvd_pool {command}: {error}") from None


WIDEST = 300
"""Characters of a cell that are shown."""

COLUMNS = ("rank", "host", "pid", "device", "state", "cell", "memory", "CPU", "plane")
SERVER_COLUMNS = ("server", "host", "pid", "keys", "values", "memory")
STORY_COLUMNS = ("no", "time", "decision", "about", "facts", "cause")
_NUMBERS = {"no", "cause", "rank", "server", "pid", "memory", "CPU", "keys", "values"}


class StatusTable:
    """Table with a row for each rank, and below one for each parameter server; text in a terminal, HTML in a notebook.

    Args:
        rows: The ranks, as :meth:`Pool.status` returns them.
        labels: Id to label of cells.

    Attributes:
        rows: The ranks.
    """

    def __init__(self, rows: Sequence[Any], labels: Mapping[str, str] | None = None) -> None:
        self.rows = list(rows)
        self._labels = dict(labels or {})

    def cells(self) -> list[tuple[str, ...]]:
        """Return the ranks' rows."""
        return [_row(row, self._hosts(), self._labels) for row in self.rows]

    def server_cells(self) -> list[tuple[str, ...]]:
        """Return the servers' rows, with the largest number of keys that a rank knows: some may not have made the store yet."""
        found: dict[tuple[str, int], list[Any]] = {}
        for row in self.rows:
            for server in row.servers:
                found.setdefault((server.host, server.index), []).append(server)
        hosts = self._hosts()
        return [
            _server_row(hosts, max(seen, key=lambda server: (server.keys, server.pid)), seen)
            for _, seen in sorted(found.items(), key=lambda item: item[0][1])
        ]

    def _hosts(self) -> dict[str, str]:
        """Return the shown name of each host, by its key."""
        keys = {str(row.host or "") for row in self.rows}
        names = Counter(key.split("#")[0] for key in keys)
        # The text behind the # distinguishes hosts of the same name.
        return {key: key if names[key.split("#")[0]] > 1 else key.split("#")[0] for key in keys}

    def __repr__(self) -> str:
        servers = self.server_cells()
        text = _text(COLUMNS, self.cells())
        return f"{text}\n\n{_text(SERVER_COLUMNS, servers)}" if servers else text

    def _repr_html_(self) -> str:
        from hvdlab.kernel_ext.notebook.cells.results import in_output

        servers = self.server_cells()
        return in_output(_html(COLUMNS, self.cells()) + (_html(SERVER_COLUMNS, servers) if servers else ""))


class StoryTable:
    """Table of the coordinator's decisions and the events that led to them; text in a terminal, HTML in a notebook.

    Args:
        entries: Entries of the decision log, oldest first.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = list(entries)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows."""
        return [_story_row(entry) for entry in self.entries]

    def __repr__(self) -> str:
        return _text(STORY_COLUMNS, self.cells())

    def _repr_html_(self) -> str:
        from hvdlab.kernel_ext.notebook.cells.results import in_output

        return in_output(_html(STORY_COLUMNS, self.cells()))


def _story_row(entry: Any) -> tuple[str, ...]:
    from hvdlab.collectives.coordinator.decision_log import subject_of

    seconds = time.strftime("%H:%M:%S", time.localtime(entry.when))
    row = (
        str(entry.number),
        f"{seconds}.{int(entry.when * 1000) % 1000:03d}",
        entry.kind,
        subject_of(entry),
        ", ".join(f"{key}: {text}" for key, text in entry.facts.items()),
        str(entry.cause or ""),
    )
    return tuple(visible(text, WIDEST) for text in row)


def _text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [columns, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            _pad(text, width, name) for text, width, name in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in table
    )


def _html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{_align(name)}>{name}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_align(n)}>{html.escape(t)}</td>" for t, n in zip(row, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _server_row(hosts: Mapping[str, str], server: Any, seen: Sequence[Any]) -> tuple[str, ...]:
    host = str(server.host)
    found = (
        str(server.index),
        hosts.get(host, host.split("#")[0]),
        str(server.pid or ""),
        str(server.keys),
        memory(server.bytes),
        memory(max(one.pss for one in seen)),
    )
    return tuple(visible(text, WIDEST) for text in found)


def _row(status: Any, hosts: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
    from hvdlab.collectives.planes.base import planes_text

    found = (
        str(status.rank),
        hosts[str(status.host or "")],
        str(status.pid or ""),
        _device(status),
        str(status.state),
        labels.get(status.cell, str(status.cell or "")),
        memory(status.pss or status.rss),
        f"{status.cpu:.1f} s" if status.cpu is not None else "",
        planes_text((str(status.plane or ""),), getattr(status, "links", {})),
    )
    return tuple(visible(text, WIDEST) for text in found)


def _device(status: Any) -> str:
    """Return the device, and the rank's share of the GPUs' memory."""
    held = getattr(status, "device_memory", 0)
    return f"{status.device or ''}, {memory(held)}" if held else str(status.device or "")


def memory(size: int | None) -> str:
    """Return bytes in the largest fitting unit; an empty text for none."""
    if not size:
        return ""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _pad(text: str, width: int, name: str) -> str:
    return text.rjust(width) if name in _NUMBERS else text.ljust(width)


def _align(name: str) -> str:
    return ' style="text-align: right"' if name in _NUMBERS else ' style="text-align: left"'

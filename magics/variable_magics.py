"""``%hvd_pull``, ``%hvd_push``, ``%hvd_diff``, ``%hvd_whos`` and ``%hvd_replay``: variables between the notebook and the ranks."""

from __future__ import annotations

import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.collectives.errors import HvdlabError, format_ranks
from hvdlab.collectives.text import visible, visible_lines
from hvdlab.magics.arguments import MagicParser, count_of, documented, identifier, parse_ranks, positive
from hvdlab.magics.notebook_pool import CellImportDisplay, Interrupted, NotebookPool, as_usage_error, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.kernel_ext.notebook.variables.diff import Diff, Diffs
    from hvdlab.kernel_ext.notebook.variables.overview import Overview, TensorTable


def pull_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_pull",
        "Bring variables from the ranks; each becomes a dict from rank to value. `x = %%hvd_pull NAME` gives it as well.",
    )
    parser.add_argument("names", nargs="+", type=identifier, metavar="NAME", help="variables of the ranks")
    parser.add_argument(
        "--ranks", metavar="0,2-3,::2", help="from these ranks only; from one rank comes the value itself"
    )
    return parser


def push_parser() -> MagicParser:
    parser = MagicParser("%hvd_push", "Send variables of the notebook to all ranks, under the same names.")
    parser.add_argument("names", nargs="+", type=identifier, metavar="NAME", help="variables of the notebook")
    return parser


class _ImportLines:
    """A line of the running cell for each module that the values of a variable imported.

    Args:
        name: The variable.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """Show that this module is imported, and leave a line if that succeeded."""
        with CellImportDisplay().importing(module):
            yield
        print(f"%hvd_pull {self._name} imported the module {visible(module)} into the notebook")


@magics_class
class ExchangeMagics(Magics):
    """Magics that move variables."""

    def __init__(self, session: NotebookPool) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(pull_parser())
    def hvd_pull(self, line: str) -> Any:
        """Bring variables from the ranks to the notebook; returns what they were bound to, a tuple if several."""
        parser = pull_parser()
        if {"-h", "--help"} & set(line.split()):
            print(parser.format_help())
            return None
        options = parser.parse(line)
        pool = self.session.need_pool("%hvd_pull")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else ranks_of(pool)
        pulled: dict[str, Any] = {}
        for name in options.names:
            try:
                with as_usage_error(), notice_if_slow(pool, ranks, f"%hvd_pull {name}"):
                    values = pool.pull(name, ranks, imports=_ImportLines(name))
            except LookupError as error:
                raise UsageError(str(error)) from None
            pulled[name] = values[ranks[0]] if options.ranks and len(ranks) == 1 else values
        self.session.shell.user_ns.update(pulled)
        found = tuple(pulled[name] for name in options.names)
        return None if self._alone(line) else found[0] if len(found) == 1 else found

    def _alone(self, line: str) -> bool:
        """Whether the magic is a line of its own: a value that it returned would only be printed, however large it is."""
        lines = (text.strip().removeprefix("%") for text in self.session.raw_cell.splitlines())
        return f"hvd_pull {line}".strip() in lines

    @line_magic
    @documented(push_parser())
    def hvd_push(self, line: str) -> None:
        """Send variables of the notebook to the ranks."""
        parser = push_parser()
        if {"-h", "--help"} & set(line.split()):
            print(parser.format_help())
            return
        options = parser.parse(line)
        pool = self.session.need_pool("%hvd_push")
        variables = self.session.shell.user_ns
        missing = [name for name in options.names if name not in variables]
        if missing:
            raise UsageError(f"%hvd_push: the notebook has no variable `{missing[0]}`")
        with as_usage_error(), notice_if_slow(pool, ranks_of(pool), "%hvd_push"):
            pool.push(**{name: variables[name] for name in options.names})


def diff_parser() -> MagicParser:
    parser = MagicParser("%hvd_diff", "Compare variables, models, optimizers or their parts over the ranks.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="variables or expressions, such as model.fc or 'a + b'"
    )
    parser.add_argument("--ranks", metavar="0,2-3,::2", help="these ranks only")
    parser.add_argument("--rng", action="store_true", help="the states of random, numpy and torch")
    parser.add_argument(
        "--env", action="store_true", help="versions of libraries, environment variables, torch's settings"
    )
    return parser


def words_of(line: str) -> list[str]:
    """The words of a line with their quotes, as in ``state['rate']``; what is quoted as a whole may have blanks."""
    words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*"|['"])+""", line)
    return [word[1:-1] if re.fullmatch(r"""'[^']*'|"[^"]*\"""", word) else word for word in words]


@magics_class
class DiffMagics(Magics):
    """Magics that compare ranks."""

    def __init__(self, session: NotebookPool) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(diff_parser())
    def hvd_diff(self, line: str) -> Diff | Diffs | None:
        """Show on which ranks a variable differs, in what, where first and by how much."""
        parser = diff_parser()
        options = parser.parse(shlex.join(words_of(line)))
        if options.help:
            print(parser.format_help())
            return None
        special = [name for name, wanted in (("rng", options.rng), ("environment", options.env)) if wanted]
        if not special and not options.names:
            raise UsageError("%hvd_diff: say what to compare, as in `%hvd_diff model` or `%hvd_diff --rng`")
        pool = self.session.need_pool("%hvd_diff")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else ranks_of(pool)
        found: list[Diff] = []
        for what, how in [*((name, "") for name in options.names), *(("", name) for name in special)]:
            with as_usage_error(), notice_if_slow(pool, ranks, f"%hvd_diff {what or how}"):
                found.append(pool.diff(what, ranks, special=how))
        if len(found) == 1:
            return found[0]
        from hvdlab.kernel_ext.notebook.variables.diff import (
            Diffs,  # here, since loading the extension must not import it
        )

        return Diffs(found)


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

    def __init__(self, session: NotebookPool) -> None:
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


_RECORD = "__import__('hvdlab.bindings.step_record', fromlist=['replay'])"


def replay_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_replay",
        "Bring a batch that hvd.record() kept on a rank: by default the first with something that is not finite.",
    )
    parser.add_argument("rank", nargs="?", metavar="R", help="the rank; by default where it went wrong first")
    parser.add_argument("--step", type=positive, metavar="N", help="this step")
    parser.add_argument(
        "--out", type=identifier, default="replay", metavar="NAME", help="its name in the notebook (replay)"
    )
    return parser


@magics_class
class ReplayMagics(Magics):
    """Magics that bring back what was recorded."""

    def __init__(self, session: NotebookPool) -> None:
        super().__init__(session.shell)
        self.session = session

    @line_magic
    @documented(replay_parser())
    def hvd_replay(self, line: str) -> None:
        """Bring a recorded batch to the notebook, as a variable whose ``run(model)`` repeats the step."""
        parser = replay_parser()
        options = parser.parse(line)
        if options.help:
            print(parser.format_help())
            return
        pool = self.session.need_pool("%hvd_replay")
        ranks = ranks_of(pool)
        if options.rank is not None:
            ranks = parse_ranks(options.rank, ranks)
        with as_usage_error(), notice_if_slow(pool, ranks, "%hvd_replay"):
            try:
                rank = (
                    ranks[0] if len(ranks) == 1 else _first_wrong(pool.pull(f"{_RECORD}.suspects()", ranks))
                )
                found = pool.pull(f"{_RECORD}.replay({options.step})", [rank])[rank]
            except LookupError as error:
                raise UsageError(visible_lines(str(error).replace(_RECORD, "hvd.record()"))) from None
        self.session.shell.user_ns[options.out] = found
        print(
            f"rank {rank}: {visible(found.text)}\n`{options.out}.args` has its inputs; `{options.out}.run(model)` repeats it"
        )


def _first_wrong(suspects: dict[int, Any]) -> int:
    """The rank on which something was not finite first; of several, the one where that was nearest to the inputs."""
    known = {rank: found for rank, found in suspects.items() if found is not None}
    if not known:
        raise UsageError("%hvd_replay: nothing was recorded; `hvd.record(model)` before the training does")
    return min(known, key=lambda rank: (known[rank][0], known[rank][1], rank))


NOTICE_AFTER = 2.0
"""Seconds until the user reads which ranks are waited for."""


@contextmanager
def notice_if_slow(pool: Pool, ranks: Sequence[int], what: str) -> Iterator[None]:
    """Around work that these ranks do after what they run; ``what`` names it for the user.

    Raises:
        KeyboardInterrupt: The user interrupted; shown as one line.
    """
    over = threading.Event()
    timer = threading.Timer(NOTICE_AFTER, _print_notice, (pool, ranks, what, over))
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"{what} was given up") from None
    finally:
        over.set()
        timer.cancel()


def _print_notice(pool: Pool, ranks: Sequence[int], what: str, over: threading.Event) -> None:
    try:
        places = pool.where(ranks)
    except HvdlabError:  # the pool has come to an end, and the work that waits fails with that
        return
    late = sorted({*places.silent, *(rank for rank, stack in places.stacks.items() if stack.cell)})
    if late and not over.is_set():
        print(f"{what} waits for {format_ranks(late)}:", *places.lines(late), sep="\n  ", file=sys.stderr)

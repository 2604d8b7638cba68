"""``%hvd_pull``, ``%hvd_push``, ``%hvd_diff``, ``%hvd_whos`` and ``%hvd_replay``: variables between the notebook and the ranks."""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import format_ranks, visible, visible_lines
from hvdlab.magics.arguments import (
    MagicParser,
    NotebookMagics,
    count_of,
    identifier,
    parse_ranks,
    positive,
    takes_options,
)
from hvdlab.magics.notebook_pool import CellImportDisplay, Interrupted, as_usage_error, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.kernel_ext.notebook.variables.diff import Diff, Diffs
    from hvdlab.kernel_ext.notebook.variables.overview import Overview, TensorTable

_RECORD = "__import__('hvdlab.bindings.step_record', fromlist=['replay'])"
NOTICE_AFTER = 2.0
"""Seconds until the user reads the ranks that a magic waits for."""


def pull_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_pull",
        "Bring variables from the ranks; each becomes a dict from rank to value. `x = %hvd_pull NAME` gives it as well.",
        example="%hvd_pull loss --ranks 0",
    )
    parser.add_argument("names", nargs="+", type=identifier, metavar="NAME", help="variables of the ranks")
    parser.add_argument(
        "--ranks", metavar="0,2-3,::2", help="from these ranks only; from one rank comes the value itself"
    )
    return parser


def push_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_push",
        "Send variables of the notebook to all ranks, under the same names.",
        example="%hvd_push config batch",
    )
    parser.add_argument("names", nargs="+", type=identifier, metavar="NAME", help="variables of the notebook")
    return parser


class DiffParser(MagicParser):
    """Parser of a line of ``%hvd_diff``, whose words are expressions."""

    def split_words(self, line: str) -> list[str]:
        """Return the words of a line with their quotes, as in ``state['rate']``; a word that is quoted as a whole may have blanks."""
        words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*"|['"])+""", line)
        return [word[1:-1] if re.fullmatch(r"""'[^']*'|"[^"]*\"""", word) else word for word in words]


def diff_parser() -> MagicParser:
    parser = DiffParser(
        "%hvd_diff",
        "Compare variables, models, optimizers or their parts over the ranks.",
        example="%hvd_diff model.fc --ranks 0,1",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="variables or expressions, such as model.fc or 'a + b'"
    )
    parser.add_argument("--ranks", metavar="0,2-3,::2", help="these ranks only")
    parser.add_argument("--rng", action="store_true", help="the states of random, numpy and torch")
    parser.add_argument(
        "--env", action="store_true", help="versions of libraries, environment variables, torch's settings"
    )
    return parser


def whos_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_whos",
        "List the variables of all ranks and where they differ, also while a cell runs.",
        example="%hvd_whos --tensors -n 50",
    )
    parser.add_argument("ranks", nargs="?", metavar="0,2-3,::2", help="these ranks only")
    parser.add_argument("--tensors", action="store_true", help="arrays and tensors, by memory")
    parser.add_argument(
        "-n", type=count_of("tensors"), default=20, metavar="N", help="with --tensors: how many (20)"
    )
    return parser


def replay_parser() -> MagicParser:
    parser = MagicParser(
        "%hvd_replay",
        "Bring a batch that hvd.record() kept on a rank: by default the first with something that is not finite.",
        example="%hvd_replay 3 --step 120",
    )
    parser.add_argument("rank", nargs="?", metavar="R", help="the rank; by default where it went wrong first")
    parser.add_argument("--step", type=positive, metavar="N", help="this step")
    parser.add_argument(
        "--out", type=identifier, default="replay", metavar="NAME", help="its name in the notebook (replay)"
    )
    return parser


@magics_class
class VariableMagics(NotebookMagics):
    """Magics that move, compare and list the variables of ranks."""

    @line_magic
    @takes_options(pull_parser())
    def hvd_pull(self, options: argparse.Namespace) -> Any:
        """Bring variables from the ranks to the notebook, and return the values that they were bound to, a tuple of several."""
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
        # Once all have come: after an error none of the names is bound.
        self.session.shell.user_ns.update(pulled)
        found = tuple(pulled[name] for name in options.names)
        return None if self._alone(options.line) else found[0] if len(found) == 1 else found

    def _alone(self, line: str) -> bool:
        """Return whether the magic is a line of its own: a value that it returned would only be printed, however large it is."""
        lines = (text.strip().removeprefix("%") for text in self.session.raw_cell.splitlines())
        return f"hvd_pull {line}".strip() in lines

    @line_magic
    @takes_options(push_parser())
    def hvd_push(self, options: argparse.Namespace) -> None:
        """Send variables of the notebook to the ranks."""
        pool = self.session.need_pool("%hvd_push")
        variables = self.session.shell.user_ns
        missing = [name for name in options.names if name not in variables]
        if missing:
            raise UsageError(f"%hvd_push: the notebook has no variable `{missing[0]}`")
        with as_usage_error(), notice_if_slow(pool, ranks_of(pool), "%hvd_push"):
            pool.push(**{name: variables[name] for name in options.names})

    @line_magic
    @takes_options(diff_parser())
    def hvd_diff(self, options: argparse.Namespace) -> Diff | Diffs | None:
        """Show on which ranks a variable differs, in which part first, and by how much."""
        special = [name for name, chosen in (("rng", options.rng), ("environment", options.env)) if chosen]
        if not special and not options.names:
            raise UsageError("%hvd_diff: say what to compare, as in `%hvd_diff model` or `%hvd_diff --rng`")
        pool = self.session.need_pool("%hvd_diff")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else ranks_of(pool)
        found: list[Diff] = []
        for name, kind in [*((name, "") for name in options.names), *(("", kind) for kind in special)]:
            with as_usage_error(), notice_if_slow(pool, ranks, f"%hvd_diff {name or kind}"):
                found.append(pool.diff(name, ranks, special=kind))
        if len(found) == 1:
            return found[0]
        from hvdlab.kernel_ext.notebook.variables.diff import Diffs  # not at %load_ext

        return Diffs(found)

    @line_magic
    @takes_options(whos_parser())
    def hvd_whos(self, options: argparse.Namespace) -> Overview | TensorTable | None:
        """List the variables of all ranks, their sizes, and where they differ."""
        pool = self.session.need_pool("%hvd_whos")
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else None
        with as_usage_error():
            return pool.tensors(ranks, most=options.n) if options.tensors else pool.variables(ranks)

    @line_magic
    @takes_options(replay_parser())
    def hvd_replay(self, options: argparse.Namespace) -> None:
        """Bring a recorded batch to the notebook, as a variable whose ``run(model)`` repeats the step."""
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


class _ImportLines:
    """Lines of the running cell about the modules that the values of a variable have imported.

    Args:
        name: The variable.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """Show that this module is being imported, and leave a line if that succeeds."""
        with CellImportDisplay().importing(module):
            yield
        print(f"%hvd_pull {self._name} imported the module {visible(module)} into the notebook")


def _first_wrong(suspects: dict[int, Any]) -> int:
    """Return the rank on which something was not finite first; of several, the one where that was nearest to the inputs."""
    known = {rank: found for rank, found in suspects.items() if found is not None}
    if not known:
        raise UsageError("%hvd_replay: nothing was recorded; `hvd.record(model)` before the training does")
    return min(known, key=lambda rank: (known[rank][0], known[rank][1], rank))


@contextmanager
def notice_if_slow(pool: Pool, ranks: Sequence[int], what: str) -> Iterator[None]:
    """Print the ranks that a magic waits for if it takes long, with where they are; turn Ctrl-C into one line.

    Args:
        pool: The pool.
        ranks: The ranks that the work inside the context waits for.
        what: The work, in words for the user.

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
    # The ranks' answers can come when the magic has already ended.
    if late and not over.is_set():
        print(f"{what} waits for {format_ranks(late)}:", *places.lines(late), sep="\n  ", file=sys.stderr)

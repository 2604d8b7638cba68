"""Base of the magics, their options, and the syntax of cells: both are parsed in the notebook, and a mistake is one sentence."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cache, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.collectives.text import format_ranks
from hvdlab.magics.notebook_pool import NotebookPool, cell_number


class Values(Enum):
    """Kinds of values that completion looks up when it is asked."""

    RANKS = auto()
    """Numbers of the pool's ranks."""
    NAMES = auto()
    """Variables of the ranks."""
    OWN_NAMES = auto()
    """Variables of the notebook."""
    POOLS = auto()
    """Names of kept pools."""


VALUES: Mapping[str, Values | list[str]] = {
    "--ranks": Values.RANKS,
    "--from": Values.RANKS,
    "--without": Values.NAMES,
    "--plane": ["auto", "shm", "mpi", "gloo", "hierarchical"],
    "hvd_rank": Values.RANKS,
    "hvd_debug": Values.RANKS,
    "hvd_replay": Values.RANKS,
    "hvd_where": Values.RANKS,
    "hvd_whos": Values.RANKS,
    "hvd_pool restart": Values.RANKS,
    "hvd_pool sync": Values.RANKS,
    "hvd_pool attach": Values.POOLS,
    "hvd_diff": Values.NAMES,
    "hvd_pull": Values.NAMES,
    "hvd_push": Values.OWN_NAMES,
}
"""Values that are no choices of argparse's: by option, by magic, or by magic and sub-command."""

OUTPUTS = ("grouped", "stream", "none")
F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound="NotebookMagics")
P = ParamSpec("P")
R = TypeVar("R")


class NotebookMagics(Magics):
    """Base of the magics of a notebook.

    Args:
        session: The notebook's pool, and the state that magics share.
    """

    def __init__(self, session: NotebookPool) -> None:
        super().__init__(session.shell)
        self.session = session


class MagicParser(argparse.ArgumentParser):
    """Parser of a magic's line, which raises UsageError instead of ending the program.

    Args:
        magic: The magic with its percent signs.
        description: One sentence for the user.
        example: A whole line that uses the magic, which its help ends with.
    """

    def __init__(self, magic: str, description: str, *, example: str) -> None:
        # No abbreviations: `parse_with_code` and `candidates` find options by their whole names.
        super().__init__(prog=magic, description=description, add_help=False, allow_abbrev=False)
        self.example = example
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def format_help(self) -> str:
        return f"{super().format_help()}\nexample:\n  {self.example}\n"

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+?)(/\S+)?: ", r"\1: ", message)
        if invalid := re.fullmatch(r"(\w+): invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message = _not_a_choice(invalid[1], invalid[2], re.findall(r"[\w.-]+", invalid[3]))
        raise UsageError(f"{self.prog}: {message}")

    def split_words(self, line: str) -> list[str]:
        """Split a line into words, as a shell does.

        Raises:
            UsageError: A quote is not closed.
        """
        try:
            return shlex.split(line)
        except ValueError as error:
            raise UsageError(f"the options can not be read: {error}") from None

    def parse(self, line: str) -> argparse.Namespace:
        """Parse a magic's line.

        Raises:
            UsageError: The line makes no sense; for an unknown option the text names the nearest known one.
        """
        found, rest = self.parse_known_args(self.split_words(line))
        if rest:
            self.error(self._unknown(rest[0]))
        return found

    def asks_for_help(self, line: str) -> bool:
        """Return whether a line has ``--help``; the other words of such a line need not make sense."""
        return not {"-h", "--help"}.isdisjoint(self.split_words(line))

    def parse_with_code(self, line: str) -> tuple[argparse.Namespace, str]:
        """Return the options at the begin of a line, and the code after them."""
        words = list(re.finditer(r"\S+", line))
        begin, index = len(line), 0
        while index < len(words):
            word = words[index].group()
            action = self._option_string_actions.get(word.split("=", 1)[0])
            if action is None:
                begin = words[index].start()
                break
            takes = action.nargs != 0 and "=" not in word
            index += 2 if takes else 1
        if begin < len(line) and re.match(r"--?[A-Za-z][\w-]*(=\S*)?$", line[begin:].split()[0]):
            self.error(self._unknown(line[begin:].split()[0]))
        return self.parse(line[:begin]), line[begin:].strip()

    def candidates(self, words: Sequence[str]) -> list[str] | Values:
        """Return the words that may follow on a line of this magic.

        Args:
            words: The words after the magic's name; the last is the one to complete, and may be empty.

        Returns:
            Options and choices; or the kind of value that is expected, which the caller has to look up.
        """
        *before, fragment = words
        positional: list[str] = []
        awaiting: argparse.Action | None = None
        for word in before:
            action = self._option_string_actions.get(word.split("=", 1)[0])
            if action is not None:
                awaiting = action if action.nargs != 0 and "=" not in word else None
            elif awaiting is not None:
                awaiting = None
            else:
                positional.append(word)
        if awaiting is not None and not fragment.startswith("-"):
            return self._values_of(awaiting, awaiting.option_strings[-1], positional)
        if fragment.startswith("-"):
            return sorted(self._option_string_actions)
        places = [action for action in self._actions if not action.option_strings]
        at = min(len(positional), len(places) - 1)
        if not places or (at < len(positional) and places[at].nargs not in ("*", "+")):
            return []
        return self._values_of(places[at], self.prog.lstrip("%"), positional)

    def _values_of(self, action: argparse.Action, name: str, positional: Sequence[str]) -> list[str] | Values:
        if action.choices is not None:
            return [str(choice) for choice in action.choices]
        if action.dest == "argument" and positional:  # of a sub-command
            name = f"{name} {positional[0]}"
        return VALUES.get(name, [])

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"`{word}` was not expected here; `{self.prog} --help` lists what is"
        near = difflib.get_close_matches(word.split("=")[0], self._option_string_actions, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` lists the options"
        return f"unknown option {word}; {hint}"


def _not_a_choice(what: str, word: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, choices, 1, 0.6)
    hint = f"did you mean `{near[0]}`? There are" if near else "there are"
    return f"`{word}` is no {what}; {hint} {', '.join(choices)}"


def count_of(things: str) -> Callable[[str], int]:
    """Return a reader of a whole number from 1, of ``lines`` for example."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
            raise argparse.ArgumentTypeError(f"a number of {things} from 1 was expected, not {text!r}")
        return int(text)

    return read


positive = count_of("ranks")


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # Not `value <= 0`, which is False for NaN.
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 was expected, not {text!r}")
    return value


def data_plane(text: str) -> str:
    """Return the name of a data plane that exists."""
    from hvdlab.kernel_ext.notebook.assembly import check_plane  # imports the fork server: not at %load_ext

    try:
        check_plane(text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def identifier(text: str) -> str:
    """Return a name that a variable can have."""
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"a variable's name was expected, not {text!r}")
    return text


PARSERS: dict[str, MagicParser] = {}
"""The parser of each magic, by its name without ``%``: completion reads the options from it."""


def documented(parser: MagicParser) -> Callable[[F], F]:
    """Append the parser's help to the docstring of a magic, for ``%magic?``, and register the parser for completion."""
    PARSERS[parser.prog.lstrip("%")] = parser

    def decorate(function: F) -> F:
        function.__doc__ = f"{function.__doc__ or ''}\n\n{parser.format_help()}"
        return function

    return decorate


def takes_options(
    parser: MagicParser,
) -> Callable[
    [Callable[Concatenate[M, argparse.Namespace, P], R]], Callable[Concatenate[M, str, P], R | None]
]:
    """Make a magic of a method that takes options: parse the line, answer ``--help``, and document the options.

    Args:
        parser: Parser of the magic's line.

    Returns:
        The decorator. The method gets the options in place of the line, which they have as ``options.line``.
    """

    def decorate(
        method: Callable[Concatenate[M, argparse.Namespace, P], R],
    ) -> Callable[Concatenate[M, str, P], R | None]:
        @wraps(method)
        def magic(self: M, line: str, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
            if parser.asks_for_help(line):
                print(parser.format_help())
                return None
            options = parser.parse(line)
            options.line = line
            return method(self, options, *args, **kwargs)

        return documented(parser)(magic)

    return decorate


def add_pool_options(parser: MagicParser) -> None:
    """Add the options that choose how ranks are started."""
    parser.add_argument(
        "-np", type=positive, metavar="N", help="number of ranks; a new number grows or shrinks the pool"
    )
    parser.add_argument(
        "--launcher", metavar="NAME", help="what starts ranks: local (default), mpi, ssh, slurm, ..."
    )
    parser.add_argument("--hosts", metavar="a:4,b:4", help="hosts and how many ranks on each")
    parser.add_argument(
        "--launcher-option",
        action="append",
        metavar="KEY=VALUE",
        help="an option that only this launcher has, such as python=/opt/bin/python; may be given several times",
    )
    parser.add_argument(
        "--plane",
        type=data_plane,
        metavar="NAME",
        help="data plane of the collectives: auto (default), shm, mpi, gloo, hierarchical",
    )


def add_cell_options(parser: MagicParser) -> None:
    """Add the options that choose how a cell is run and shown."""
    parser.add_argument(
        "--output",
        choices=OUTPUTS,
        default="grouped",
        help="how output is arranged (default: grouped); `%%hvd_output --ranks 3` shows that of one rank",
    )
    parser.add_argument("--out", type=identifier, metavar="NAME", help="bind the values of all ranks to NAME")
    parser.add_argument(
        "--background", action="store_true", help="return at once; output goes on to this cell"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="interrupt the cell after S seconds")


@cache
def run_parser(magic: str = "%%hvd_run") -> MagicParser:
    parser = MagicParser(
        magic,
        "Run this cell on the ranks; the pool is started by the first cell.",
        example="%%hvd_run -np 8 --out losses" if magic.startswith("%%") else "%hvd_run -np 8 import torch",
    )
    add_pool_options(parser)
    parser.add_argument("--ranks", metavar="0,2-3,::2", help="run on these ranks only")
    parser.add_argument(
        "--sync", action="store_true", help="first bring ranks that came later what the others know"
    )
    add_cell_options(parser)
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="training goes on while ranks are lost, repaired, added and let go; newcomers join by themselves",
    )
    parser.add_argument(
        "--min-np",
        type=positive,
        metavar="N",
        help="with --elastic: training waits while there are fewer (default: 1)",
    )
    parser.add_argument(
        "--max-np",
        type=positive,
        metavar="N",
        help="with --elastic: the pool does not grow beyond that meanwhile",
    )
    return parser


def rank_parser() -> MagicParser:
    parser = MagicParser(
        "%%hvd_rank",
        "Run this cell on some ranks of the running pool, to look or to fix.",
        example="%%hvd_rank 3 --timeout 10",
    )
    parser.add_argument("ranks", metavar="R", help="ranks, such as 3 or 0,2-3 or ::2")
    add_cell_options(parser)
    return parser


def parse_ranks(text: str, ranks: list[int]) -> list[int]:
    """Return the ranks of a text such as ``0,2-3,::2``; slices count positions among ``ranks``.

    Raises:
        UsageError: The text names no rank, or one that the pool has not.
    """
    chosen: set[int] = set()
    for part in text.replace(" ", "").split(","):
        chosen.update(_part(part, ranks))
    if not chosen:
        raise UsageError(f"--ranks {text}: no rank is left; the pool has {_have(ranks)}")
    return sorted(chosen)


def _part(part: str, ranks: list[int]) -> list[int]:
    if re.fullmatch(r"(-?\d*):(-?\d*)(:(-?\d*))?", part):
        bounds = [int(n) if n else None for n in part.split(":")]
        if len(bounds) == 3 and bounds[2] == 0:
            raise UsageError(f"--ranks {part}: the step of a slice can not be 0")
        return ranks[slice(*bounds)]
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None:
        raise UsageError(
            f"--ranks {part or 'with nothing'}: write ranks as 3, 2-5 or ::2, separated by commas"
        )
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise UsageError(f"--ranks {part}: write the smaller rank first, {high}-{low}")
    missing = [r for r in range(low, high + 1) if r not in ranks]
    if missing:
        raise UsageError(f"rank {missing[0]} is out of range; the pool has {_have(ranks)}")
    return list(range(low, high + 1))


def _have(ranks: list[int]) -> str:
    return format_ranks(ranks) if ranks else "no ranks"


_OUR_CELL = re.compile(r"%%(?:hvd_run|hvd_rank|local)\b")


class SourceError(HvdlabError):
    """Error of a cell that can not be compiled; raised as a subclass with the name of Python's own error."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        self._lines = lines
        super().__init__(f"{error.msg} (line {error.lineno})")

    def _render_traceback_(self) -> list[str]:
        return self._lines


def check_syntax(shell: InteractiveShell, source: str, line_offset: int) -> None:
    """Compile a cell as a rank would, with IPython's syntax and ``await`` at top level.

    Raises:
        SourceError: The cell does not compile; the line numbers are those of the notebook's cell.
    """
    try:
        # A new manager: the shell's, if the user or %autohvd changed it, would transform the cell a second time.
        manager = TransformerManager()
        python = manager.transform_cell(source)
        code = "\n" * line_offset + python
        name = shell.compile.cache(code, cell_number(shell))  # tracebacks call it `Cell In[7]`
        compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        if error.text is None and error.lineno is not None:
            lines = ("\n" * line_offset + source).splitlines()
            error.text = lines[error.lineno - 1] if error.lineno <= len(lines) else None
        raise _named(shell, error) from None


def _named(shell: InteractiveShell, error: SyntaxError) -> SourceError:
    tb = shell.SyntaxTB
    lines = tb.structured_traceback(type(error), error, None)
    kind: type[SourceError] = type(
        type(error).__name__, (SourceError,), {"__module__": SourceError.__module__}
    )
    return kind(error, lines)


def magic_line_offset(raw: str, magic: str) -> int:
    """Count the lines of a notebook's cell above the source: the magic's line and those before it.

    Args:
        raw: The cell as the user wrote it. Without the magic in it (``%autohvd``) nothing is above.
        magic: The magic without percent signs.
    """
    match = re.search(rf"^[ \t]*%%{re.escape(magic)}\b", raw, re.MULTILINE)
    return raw[: match.start()].count("\n") + 1 if match else int(not raw)


def give_body(lines: list[str]) -> list[str]:
    """Append an empty line to a cell that is nothing but the first line of a cell magic of hvdlab.

    IPython refuses a cell magic without a body before it calls it: ``%%hvd_run --help`` alone in a cell would show no help.
    """
    written = [line for line in lines if line.strip()]
    if len(written) != 1 or not _OUR_CELL.match(written[0]):
        return lines
    return [*lines, "\n"]

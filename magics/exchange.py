"""``%hvd_pull`` and ``%hvd_push``: variables between the notebook and the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.collectives.text import visible
from hvdlab.magics.arguments import MagicParser, documented, identifier, parse_ranks
from hvdlab.magics.patience import patience
from hvdlab.magics.progress import CellImportDisplay
from hvdlab.magics.session import Session, as_usage_error, ranks_of


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

    def __init__(self, session: Session) -> None:
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
                with as_usage_error(), patience(pool, ranks, f"%hvd_pull {name}"):
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
        with as_usage_error(), patience(pool, ranks_of(pool), "%hvd_push"):
            pool.push(**{name: variables[name] for name in options.names})

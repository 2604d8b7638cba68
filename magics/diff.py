"""``%hvd_diff``: a variable compared over the ranks."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, documented, parse_ranks
from hvdlab.magics.patience import patience
from hvdlab.magics.session import Session, as_usage_error, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.variables.diff import Diff, Diffs


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

    def __init__(self, session: Session) -> None:
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
            with as_usage_error(), patience(pool, ranks, f"%hvd_diff {what or how}"):
                found.append(pool.diff(what, ranks, special=how))
        if len(found) == 1:
            return found[0]
        from hvdlab.kernel_ext.notebook.variables.diff import (
            Diffs,  # here, since loading the extension must not import it
        )

        return Diffs(found)

"""``%hvd_replay``: a recorded batch of a rank, in the notebook."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from hvdlab.collectives.text import visible, visible_lines
from hvdlab.magics.arguments import MagicParser, documented, identifier, parse_ranks, positive
from hvdlab.magics.patience import patience
from hvdlab.magics.session import Session, as_usage_error, ranks_of

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

    def __init__(self, session: Session) -> None:
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
        with as_usage_error(), patience(pool, ranks, "%hvd_replay"):
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

"""Around code that waits for ranks: says for which ones if it takes long, and ends in one line if the user interrupts it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvdlab.collectives.errors import HvdlabError, format_ranks
from hvdlab.magics.session import Interrupted

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool

PATIENCE = 2.0
"""Seconds until the user reads which ranks are waited for."""


@contextmanager
def patience(pool: Pool, ranks: Sequence[int], what: str) -> Iterator[None]:
    """Around work that these ranks do after what they run; ``what`` names it for the user.

    Raises:
        KeyboardInterrupt: The user interrupted; shown as one line.
    """
    over = threading.Event()
    timer = threading.Timer(PATIENCE, _tell, (pool, ranks, what, over))
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"{what} was given up") from None
    finally:
        over.set()
        timer.cancel()


def _tell(pool: Pool, ranks: Sequence[int], what: str, over: threading.Event) -> None:
    try:
        places = pool.where(ranks)
    except HvdlabError:  # the pool has come to an end, and the work that waits fails with that
        return
    late = sorted({*places.silent, *(rank for rank, stack in places.stacks.items() if stack.cell)})
    if late and not over.is_set():
        print(f"{what} waits for {format_ranks(late)}:", *places.lines(late), sep="\n  ", file=sys.stderr)

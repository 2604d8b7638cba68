"""Checks of whether a pool is possible, before anything is started."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdlab.collectives import context
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.variables import ABSENT_PLANES, PLANES
from hvdlab.launch.forkserver.children import REMEDIES, why_not


def default_size() -> int:
    """Usable cores, at least 2, so that there is something to communicate."""
    return max(2, len(os.sched_getaffinity(0)))


def check_size(np: Any) -> int:
    """``np`` as a number of ranks. Raises ``InvalidRequestError``."""
    if isinstance(np, bool) or not isinstance(np, int):
        raise InvalidRequestError(f"np={np!r} is no number of ranks; give a whole number, such as np=4.")
    if np < 1:
        raise InvalidRequestError(f"np={np}: a pool has at least one rank; pool.stop() ends all of them.")
    if np > MOST_RANKS:
        raise InvalidRequestError(f"np={np}: a pool has {MOST_RANKS} ranks at most.")
    return np


def open_standard_streams() -> None:
    """Open `/dev/null` for each of stdin, stdout and stderr that is closed.

    Else the next sockets and pipes would get the numbers 0 to 2, and all children would take them for their standard streams.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(
                os.devnull, os.O_RDWR
            )  # the lowest number that is free, which is this one; children inherit it below
            os.set_inheritable(descriptor, True)


def check_not_in_rank() -> None:
    """Whether this process may start a pool. Raises ``InvalidRequestError`` in a rank: each rank would start one."""
    if context.in_rank_of_pool():
        raise InvalidRequestError(
            "this is a rank, and each rank would start a pool of its own; run the cell (or Pool.start) in the notebook, "
            "without %%hvd_run around it"
        )


def check_sees_ranks(what: str) -> None:
    """Check that this process is a notebook's, which has the ranks, and not one of the ranks itself.

    Args:
        what: The call or magic that needs the ranks, for the error's text.

    Raises:
        InvalidRequestError: This is a rank.
    """
    if context.in_rank_of_pool():
        raise InvalidRequestError(
            f"{what}: this is a rank, which does not see the others; run it in the notebook's own process: in a cell "
            "without %%hvd_run, or under %%local where cells run on the ranks"
        )


@contextmanager
def limits_explained(what: str) -> Iterator[None]:
    """Turn an error by a limit of this process or host into one sentence, which begins with ``what``.

    Raises:
        StartError: A file could not be opened, or a thread or process not be started, for such a limit.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES or isinstance(error, HvdlabError):
            raise
        raise StartError(f"{what}: {why_not(error)}") from error
    except RuntimeError as error:
        if isinstance(error, HvdlabError) or "start new thread" not in str(error):
            raise
        raise StartError(f"{what}: {error}: {REMEDIES[errno.EAGAIN]}") from error


def check_plane(plane: str) -> None:
    """Raise ``InvalidRequestError`` for a data plane that does not exist."""
    usable = [name for name in PLANES if name != "local"]
    if plane not in usable:
        why = ABSENT_PLANES.get(plane, f"there is no data plane {plane!r}")
        raise InvalidRequestError(f"{why}; choose one of {', '.join(usable)}.")

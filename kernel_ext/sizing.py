"""How many ranks a pool has, and how lost ones come back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import InvalidRequestError, format_ranks
from hvdlab.kernel_ext import checks

if TYPE_CHECKING:
    from hvdlab.kernel_ext.base import PoolBase


class Sizing:
    """The part of a pool that starts and ends ranks; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _base: PoolBase
    _changing: threading.RLock

    def resize(self, np: int, *, timeout: float = 60) -> None:
        """Change the number of ranks. Those that stay keep their process and variables.

        Raises:
            InvalidRequestError: This size can't be had; nothing has changed.
            StartError: A new rank did not start; the others are as before.
        """
        self._check_running()
        wanted = checks.check_size(np)
        with self._changing, checks.limits_told(f"the pool could not get {wanted} ranks"):
            self._base.check_resizable(wanted)
            self._base.group.want(range(wanted), Deadline(timeout))
            self._base.note_kept()

    def repair(self, *, timeout: float = 60) -> tuple[int, ...]:
        """Start lost ranks again under their old numbers, with empty memory. Returns them.

        Raises:
            StartError: One did not start; it stays lost.
        """
        self._check_running()
        deadline = Deadline(timeout)
        with self._changing:
            self._base.group.settle(deadline)
            lost = self._base.group.members.lost
            if lost:
                self._base.check_replaceable()
                self._base.group.want(self._base.group.members.wanted, deadline, replace_lost=True)
            return lost

    def restart(self, ranks: Sequence[int] | None = None, *, timeout: float = 60) -> None:
        """End ranks (by default all), whatever they are doing, and start them again with empty memory."""
        self._check_running()
        with self._changing:
            self._base.check_replaceable()
            wanted = self._base.group.members.wanted
            chosen = wanted if ranks is None else tuple(ranks)
            if unknown := sorted(set(chosen) - set(wanted)):
                raise InvalidRequestError(
                    f"there is no rank {unknown[0]}; the pool has {format_ranks(wanted)}."
                )
            deadline = Deadline(timeout)
            self._base.group.end(chosen, deadline)
            self._base.group.want(wanted, deadline, replace_lost=True)

    # -- what the rest of a pool has ------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[int, str]:
        raise NotImplementedError

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        raise NotImplementedError

    def _check_running(self) -> None:
        raise NotImplementedError

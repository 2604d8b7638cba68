"""How many ranks a pool has, how lost ones come back, and how new ones get the variables of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, format_ranks
from hvdlab.kernel_ext import checks
from hvdlab.kernel_ext.newcomers import Synced

if TYPE_CHECKING:
    from hvdlab.kernel_ext.base import PoolBase
    from hvdlab.kernel_ext.cells.results import CellResults


class Sizing:
    """The part of a pool that starts and ends ranks, and brings them what others know; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _base: PoolBase
    _changing: threading.RLock

    def resize(self, np: int, *, timeout: float = 60) -> None:
        """Change the number of ranks. Those that stay keep their process and variables.

        While an elastic cell runs, ranks that are added get to know what the others know and take part in it, and ranks
        that are too many leave at their next commit, so that no step is lost.

        Ranks are numbered from 0, so those with the highest numbers leave.

        Raises:
            InvalidRequestError: The pool can't have this size, or a rank that lives would end while a lost one stays; nothing has
                changed.
            StartError: A new rank did not start within ``timeout`` seconds; the others are as before. Or a rank that leaves did not
                come to a commit by then: it leaves when it does, and only then the pool can be resized again.
        """
        self._check_running()
        wanted = checks.check_size(np)
        with self._changing, checks.limits_explained(f"the pool could not get {wanted} ranks"):
            self._base.check_resizable(wanted)
            self._base.check_elastic(wanted)
            self._check_dropped(wanted)
            deadline, before = Deadline(timeout), self._base.group.ready()
            leaving = tuple(rank for rank in before if rank >= wanted) if self._base.runs.elastic() else ()
            if leaving:
                self._base.runs.release(leaving)
            if leaving or self._base.group.members.let_go:  # an earlier call may not have waited long enough
                try:
                    self._base.group.let_go(
                        [r for r in self._base.group.members.wanted if r < wanted], deadline
                    )
                finally:
                    self._base.note_kept()  # the ranks have been let go, also if they have not left in time
            self._base.group.want(range(wanted), deadline)
            new = [rank for rank in self._base.group.ready() if rank not in before]
            self._base.came("resize", new)
            self._base.note_kept()
            self._base.bring_in(new, timeout)

    def _check_dropped(self, size: int) -> None:
        """Raises ``InvalidRequestError`` if a living rank would end, with its variables, in place of a lost one."""
        ending = [rank for rank in self._base.group.ready() if rank >= size]
        lost = [rank for rank in self.lost if rank < size]
        if not ending or not lost:
            return
        are, one, them = ("is", "it", "its") if len(lost) == 1 else ("are", "them", "their")
        raise InvalidRequestError(
            f"{format_ranks(lost)} {are} lost, but {format_ranks(ending)} would end, with all variables there, since ranks are "
            f"numbered from 0; `%hvd_pool repair` or pool.repair() replaces {one} first, under {them} old "
            f"number{'' if len(lost) == 1 else 's'}"
        )

    def repair(self, *, timeout: float = 60) -> tuple[int, ...]:
        """Start lost ranks again under their old numbers, with empty memory. Returns them.

        While an elastic cell runs, they get to know what the others know and take part in it.

        Raises:
            InvalidRequestError: The launcher can't start single ranks.
            StartError: A rank did not start within ``timeout`` seconds; it stays lost.
        """
        self._check_running()
        deadline = Deadline(timeout)
        with self._changing:
            self._base.group.settle(deadline)
            lost = self._base.group.members.lost
            if lost:
                self._base.check_replaceable()
                self._base.group.want(self._base.group.members.wanted, deadline, replace_lost=True)
                self._base.came("repair", lost)
                self._base.bring_in(lost, timeout)
            return lost

    def restart(self, ranks: Sequence[int] | None = None, *, timeout: float = 60) -> None:
        """End ranks (by default all), whatever they are doing, and start them again with empty memory.

        Raises:
            InvalidRequestError: One of them does not exist, or the launcher can't start single ranks.
            StartError: A rank did not start within ``timeout`` seconds; it is lost.
        """
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
            self._base.came("restart", chosen)
            self._base.bring_in(chosen, timeout)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Living ranks that were started after others, and to which :meth:`sync` has brought nothing yet."""
        newcomers = self._base.newcomers.all()
        return tuple(rank for rank in self._base.group.ready() if rank in newcomers)

    def sync(
        self,
        ranks: Sequence[int] | None = None,
        *,
        source: int | None = None,
        without: Collection[str] = (),
        timeout: float | None = None,
    ) -> Synced:
        """Bring what one rank knows to others: modules are imported there, variables copied; those of that name are replaced.

        Values travel from rank to rank as collectives do, once for all ranks together. What belongs together stays
        so: an optimizer has the parameters of its model. A ``DistributedOptimizer`` reduces gradients again. Gradients
        and states of random number generators stay behind; tensors come to the device of the same name. It runs as a
        cell on all ranks, after what they run.

        Args:
            ranks: The ranks that get it; by default :attr:`newcomers`.
            source: The rank that it comes from; by default the first one that is not in ``ranks``.
            without: Names of variables to leave out.
            timeout: Seconds after which the copying is interrupted; None for no limit.

        Returns:
            What was brought, and what could not be and why.

        Raises:
            InvalidRequestError: No rank came later and none was named, or a rank of the pool is lost. Nothing was sent.
            HvdlabError: A rank failed meanwhile, or could not take the values: it has none of them.
        """
        chosen = self.newcomers if ranks is None else ranks
        if not chosen:
            raise InvalidRequestError(
                "no rank came later than the others; name those that are to get what another knows, as in "
                "`%hvd_pool sync 2-3`."
            )
        targets = self._chosen(chosen)
        others = [rank for rank in self._chosen(None) if rank not in targets]
        if not others and source is None:
            raise InvalidRequestError("there is no other rank that they could have anything from.")
        source = others[0] if source is None else self._chosen([source])[0]
        if source in targets:
            raise InvalidRequestError(f"rank {source} can't get from itself what it knows.")
        if lost := self.lost:  # a newcomer's hvd.init() would wait for it
            are = "is" if len(lost) == 1 else "are"
            raise InvalidRequestError(
                f"{format_ranks(list(lost))} {are} lost, and the world is complete only with all of its ranks; "
                "`%hvd_pool repair` or pool.repair() comes first."
            )
        begin = time.monotonic()
        call = f"bring({source}, {targets!r}, {tuple(without)!r})"
        cell = f"__import__('hvdlab.kernel_ext.rank.sync', fromlist=['bring']).{call}"
        results = self.run(cell, label="sync", timeout=timeout, store_history=False)
        if (ran := self._base.transcripts.find("sync")) is not None:  # `%hvd_output` is of the user's cells
            self._base.transcripts.forget(ran.transcript.cell)
        if not results.ok:
            cause = results.root_cause
            raise HvdlabError(
                f"nothing was brought: {cause.evalue if cause is not None else 'it was interrupted'}"
            )
        given, failed = results.value(source), dict(results.value(source)["failed"])
        for rank in targets:
            got = results.value(rank)
            if got["error"]:
                raise HvdlabError(
                    f"rank {rank} could not take what rank {source} knows: {got['error']}; `--without NAME` leaves out "
                    "what it is about"
                )
            failed |= got["failed"]
        self._base.newcomers.know(targets)
        seconds = time.monotonic() - begin
        return Synced(
            source, targets, tuple(given["names"]), tuple(given["modules"]), failed, given["nbytes"], seconds
        )

    # -- what the rest of a pool has ------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[int, str]:
        raise NotImplementedError

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        raise NotImplementedError

    def run(
        self, source: str, *, label: str = "", timeout: float | None = None, store_history: bool = True
    ) -> CellResults:
        raise NotImplementedError

    def _check_running(self) -> None:
        raise NotImplementedError

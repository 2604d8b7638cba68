"""The pool: ranks that stay alive between cells, and everything that a notebook or a script does with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from hvdlab.collectives.client import Client
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import InvalidRequestError, StartError, format_ranks
from hvdlab.collectives.membership import LEAVES
from hvdlab.kernel_ext import checks, transfer
from hvdlab.kernel_ext.asking import ANSWER_WITHIN, Asking
from hvdlab.kernel_ext.base import PoolBase, Progress
from hvdlab.kernel_ext.cells.drive import CellHandle
from hvdlab.kernel_ext.cells.results import ImportDisplay
from hvdlab.kernel_ext.cells.sink import OutputSink
from hvdlab.kernel_ext.history import ElasticState
from hvdlab.kernel_ext.inspect.looking import Looking
from hvdlab.kernel_ext.inspect.views import Ranks
from hvdlab.kernel_ext.kept_pools import launcher_of
from hvdlab.kernel_ext.leftovers import LeftCell
from hvdlab.kernel_ext.measuring import Measuring
from hvdlab.kernel_ext.output.record import Transcripts
from hvdlab.kernel_ext.payloads import AskStatus, Status
from hvdlab.kernel_ext.recording import Recording
from hvdlab.kernel_ext.running import Running
from hvdlab.kernel_ext.sizing import Sizing
from hvdlab.kernel_ext.status import RankStatus
from hvdlab.launch.starter import Capability

if TYPE_CHECKING:
    from ipyparallel import Cluster  # type: ignore[import-untyped]  # has no types

    from hvdlab.kernel_ext.prestart import Prestart


class Pool(Running, Measuring, Sizing, Asking, Looking):
    """The ranks of one user. All methods may be called from any thread.

    ``Pool.start(8)`` starts ranks, and ``Pool.attach("mine")`` finds those of a kept pool; ``hvdlab.pool()`` is the pool of the
    notebook's own magics.

    Attributes:
        launcher, plane: The names that the caller of :meth:`start` gave.
        replaceable: Whether the launcher can start single ranks, so that lost ones can be replaced.
    """

    def __init__(self, base: PoolBase) -> None:
        self._base = base
        self.launcher, self.plane = base.launcher, base.plane
        self.replaceable = Capability.SINGLE_RANKS in base.launch.capabilities
        self._changing = threading.RLock()
        self._stopped = False
        self._timeline: Recording | None = None
        # When this process exits, or the pool is garbage-collected, the ranks end, unless the pool is kept.
        self._leave = weakref.finalize(self, base.leave)

    @classmethod
    def start(
        cls,
        np: int | None = None,
        *,
        launcher: str = "local",
        plane: str = "auto",
        hosts: str | None = None,
        launcher_options: Mapping[str, str] | None = None,
        warm: Prestart | None = None,
        keep: str | None = None,
        timeout: float = 60,
        on_progress: Progress | None = None,
    ) -> Pool:
        """Start ranks and wait until all of them take cells.

        Args:
            np: How many ranks; by default one for each usable core.
            launcher: ``local``, ``ssh``, ``mpi``, one of ipyparallel's launchers, or one that an installed package offers
                by the entry point group ``hvdlab.launchers``.
            plane: Data plane of the collectives, or ``auto``.
            hosts: ``a:4,b:4``, for launchers that start ranks on several hosts.
            launcher_options: Options that only this launcher has, as texts; one that it does not know is refused.
            warm: What :meth:`hvdlab.kernel_ext.prestart.Prestart.begin` began; the pool takes it over, and closes it if
                this fails.
            keep: A name for the pool; with an empty text the pool chooses one. The ranks then outlive this process, until
                :meth:`stop`, and another process finds them by :meth:`attach`. Only for the launchers ``local`` and ``ray``.
            timeout: Seconds for the whole start.
            on_progress: Called with a short text at each step, on the calling thread.

        Raises:
            InvalidRequestError: The arguments don't fit each other or this host; nothing was started.
            StartError: Something did not start, or not in time; nothing is left behind.
        """
        checks.open_standard_streams()
        try:
            checks.check_not_in_rank()
            size = checks.check_size(checks.default_size() if np is None else np)
            with checks.limits_explained("the pool could not be started"):
                base = PoolBase.start(
                    size,
                    launcher,
                    plane,
                    hosts or "",
                    launcher_options or {},
                    warm,
                    keep,
                    Deadline(timeout),
                    on_progress or _say_nothing,
                )
        except BaseException:
            if warm is not None:
                warm.close()
            raise
        return cls(base)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        launcher: str | None = None,
        show: Callable[[LeftCell], OutputSink] | None = None,
        timeout: float = 60,
        on_progress: Progress | None = None,
    ) -> Pool:
        """Go on with a pool that was started with ``keep``, by a process that has ended or called :meth:`detach`.

        The ranks have all their variables. What they are running goes on.

        Args:
            name: The pool's name; ``hvdlab pools`` on the command line lists them.
            launcher: The pool's launcher. By default the pool is looked for on this host, and on the Ray cluster that this process is
                connected to or that ``RAY_ADDRESS`` names; ``ray`` also finds a cluster that runs on this host.
            show: Called with each cell whose end the former process has not seen; it returns the sink for the cell's output:
                the newest 4 MiB of each rank and what follows. :attr:`resumed` has these cells. Without it nothing is
                shown of them, and only elastic cells that run are among these: ranks go on joining and leaving them.
            timeout: Seconds.
            on_progress: As for :meth:`start`.

        Raises:
            InvalidRequestError: There is no pool of this name, or another process uses it; the text says which.
            StartError: The pool does not answer.
        """
        found = launcher or launcher_of(name)
        return cls(PoolBase.attach(name, found, Deadline(timeout), on_progress or _say_nothing, show))

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of a pool that outlives this process; empty for any other pool."""
        return self._base.keeping.name if self._base.keeping is not None else ""

    @property
    def ranks(self) -> Ranks:
        """Ranks that live and take cells, as numbers; ``ranks[3]`` is a view of rank 3's variables."""
        return Ranks(() if self._stopped else self._base.group.ready(), self)

    @property
    def resumed(self) -> tuple[CellHandle, ...]:
        """Cells that :meth:`attach` found and has gone on with."""
        return tuple(self._base.resumed)

    @property
    def size(self) -> int:
        """Number of ranks that the pool is made of, lost ones included."""
        return 0 if self._stopped else len(self._base.group.members.wanted)

    @property
    def lost(self) -> dict[int, str]:
        """Rank to the reason of its end, for ranks that have ended; :meth:`repair` starts them again."""
        members = self._base.group.members
        return {rank: m.reason for rank in members.lost if (m := members.get(rank)) is not None}

    def last_words(self, rank: int) -> str:
        """The last lines of a lost rank's standard error that were left unread when it ended, such as a crash report."""
        member = self._base.group.members.get(rank)
        return member.tail if member is not None else ""

    @property
    def state(self) -> str:
        """``idle``, ``running``, ``starting`` (also while the size changes) or ``stopped``."""
        if self._stopped:
            return "stopped"
        if not self._changing.acquire(blocking=False):
            return "starting"
        self._changing.release()
        return "running" if self._base.runs.active else "idle"

    @property
    def broken(self) -> str:
        """Why nothing can be done with the pool any more but to stop it; empty if all is well."""
        return "" if self._stopped else self._base.broken

    def news(self) -> list[str]:
        """Sentences about what happened while no cell was running, such as a coordinator that was replaced.

        What happens while cells run is shown under these cells. Each sentence is returned once.
        """
        return [] if self._stopped else self._base.news()

    @property
    def client(self) -> Client:
        """The connection to the coordinator."""
        return self._base.client

    @property
    def transcripts(self) -> Transcripts:
        """What the cells of this pool wrote."""
        return self._base.transcripts

    @property
    def cluster(self) -> Cluster:
        """The ``ipyparallel.Cluster`` of these ranks. The first use waits until its controller is up (about 1 s)."""
        self._check_running()
        return self._base.companion.cluster

    def status(self) -> list[RankStatus]:
        """What each rank is doing, whether or not it runs a cell. Takes a second at most."""
        self._check_running()
        members, runs = self._base.group.members, self._base.runs
        there = tuple(sorted({*members.ready, *members.let_go}))
        answers = runs.questions.ask(AskStatus, there, Deadline(ANSWER_WITHIN))
        hosts = {member.rank: member.host for member in self.client.membership().members}
        found: list[RankStatus] = []
        for rank in sorted({*members.wanted, *members.let_go}):
            member, answer = members.get(rank), answers.get(rank)
            if member is None:
                continue
            state = f"lost: {member.reason}" if member.reason else member.state.value
            if isinstance(answer, Status):
                status = _status(rank, hosts.get(rank, ""), member.pid, answer)
                found.append(
                    replace(status, state=f"{status.state}, {LEAVES}") if member.at_commit else status
                )
            else:
                state = "no answer" if rank in there else state
                found.append(RankStatus(rank, hosts.get(rank, ""), member.pid, state=state))
        return found

    def elastic(self) -> ElasticState:
        """Which ranks there are, since when and from where, which the pool still waits for, and what became of the others."""
        self._check_running()
        members, world, history = self._base.group.members, self.client.membership(), self._base.history
        runs = self._base.runs
        states: dict[int, str] = {}
        for rank in members.wanted:
            member = members.get(rank)
            if member is None:
                continue
            if member.reason:
                states[rank] = f"lost: {member.reason}"
            elif rank in world.waiting:
                states[rank] = "waits to be let in"
            else:
                states[rank] = member.state.value
        states |= dict.fromkeys((rank for rank in members.let_go if rank not in states), LEAVES)
        return ElasticState(
            generation=world.epoch,
            cells=[(runs.label(cell), *found) for cell, found in runs.elastic().items()],
            members=states,
            awaited=tuple(rank for rank in members.wanted if rank not in members.ready),
            arrivals={rank: came for rank in states if (came := history.arrival(rank)) is not None},
            history=history.all(),
            newcomers=self.newcomers,
        )

    def on_membership_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called after each change of what :meth:`elastic` returns, on any thread. It must not block.

        Returns:
            A function that ends that. A call that is already under way may still come afterwards.
        """
        return self._base.history.listen(callback)

    @property
    def first_to_fail(self) -> int | None:
        """The rank that failed first in the last cell that did not end well; None if there was none."""
        return self._base.runs.first_to_fail

    @property
    def hanging(self) -> dict[int, str]:
        """Rank to the label of its cell, for ranks that were given up after an interrupt and still are in that cell."""
        given_up = self._base.runs.given_up
        if not given_up or self._stopped:
            return {}
        asked = [rank for rank in given_up if rank in self.ranks]
        for rank, answer in self._base.runs.questions.ask(AskStatus, asked, Deadline(ANSWER_WITHIN)).items():
            cell, _ = given_up[rank]
            if isinstance(answer, Status) and answer.cell != cell:
                self._base.runs.answers_again(rank, cell)
        return {rank: label for rank, (_, label) in self._base.runs.given_up.items()}

    # -- variables ------------------------------------------------------------------------------------------------

    def push(self, /, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Bind variables on these ranks (by default all); a rank does it once the cell that it runs has ended.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist.
            HvdlabError: A value can't be pickled, or a rank could not unpickle it.
        """
        transfer.push(self._base.runs.questions, values, self._chosen(ranks), near=self._near())

    def pull(
        self, name: str, ranks: Sequence[int] | None = None, *, imports: ImportDisplay | None = None
    ) -> dict[int, Any]:
        """Return the value of a variable or expression on these ranks (by default all), by rank.

        Args:
            name: The variable or expression.
            ranks: The ranks.
            imports: Shows which modules the values import in this process; None shows nothing.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist.
            LookupError: The value does not exist on a rank, can't be sent, or there is no memory for it in this process.
        """
        return transfer.pull(
            self._base.runs.questions, name, self._chosen(ranks), near=self._near(), imports=imports
        )

    def _near(self) -> set[int]:
        return self._base.near()

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        self._check_running()
        ready = self.ranks
        chosen = ready if ranks is None else tuple(sorted(set(ranks)))
        missing = [rank for rank in chosen if rank not in ready]
        if not missing and chosen:
            return chosen
        lost = self.lost
        if not missing:
            raise InvalidRequestError(
                "the pool has no rank that lives; pool.repair() starts the lost ones again."
            )
        if missing[0] in lost:
            raise InvalidRequestError(
                f"rank {missing[0]} is lost ({lost[missing[0]]}); `%hvd_pool repair` or pool.repair() replaces it."
            )
        raise InvalidRequestError(f"there is no rank {missing[0]}; the pool has {format_ranks(ready)}.")

    # -- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all ranks and everything that belongs to the pool. Idempotent; cells that run end as if their ranks had died."""
        with self._changing:
            if self._stopped:
                return
            self._stopped = True
            try:
                self.stop_timeline()
            finally:
                self._leave.detach()
                self._base.close()

    def detach(self) -> None:
        """Let go of a pool that was started with ``keep``: its ranks stay. Idempotent.

        Raises:
            InvalidRequestError: The pool was started without ``keep``.
        """
        if not self.name:
            raise InvalidRequestError(
                "these ranks end with this process; only a pool that was started with keep= "
                "(`%hvd_pool start --keep`) can be left to itself"
            )
        self._base.runs.release_pool()  # before the lock, which may take longer than an interrupt is delayed
        with self._changing:
            if self._stopped:
                return
            self._stopped = True
            try:
                self.stop_timeline()
            finally:
                self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self._stopped:
            return "<Pool stopped>"
        lost = f", {len(self.lost)} lost" if self.lost else ""
        return f"<Pool of {self.size} ranks{lost}, {self.state}, launcher {self.launcher}>"

    def _check_running(self) -> None:
        if self._stopped:
            raise InvalidRequestError(
                "the pool has been stopped; start a new one with `%hvd_pool start` or Pool.start()."
            )
        if broken := self._base.broken:
            raise StartError(f"the pool has broken down: {broken}; stop it and start a new one.")


def _status(rank: int, host: str, pid: int, answer: Status) -> RankStatus:
    return RankStatus(
        rank,
        host,
        pid,
        answer.device,
        answer.state,
        answer.cell,
        answer.rss,
        answer.pss,
        answer.cpu,
        answer.threads,
        answer.plane,
        answer.pending,
        answer.servers,
        answer.device_memory,
        answer.links,
    )


def _say_nothing(text: str) -> None:
    """The progress callback of a caller that gave none."""

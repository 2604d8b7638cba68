"""The pool: ranks that stay alive between cells, and everything that a notebook or a script does with them."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from hvdlab.collectives.client import Client
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.hosts import host_key
from hvdlab.collectives.errors import InvalidRequestError, StartError, format_ranks
from hvdlab.kernel_ext import checks, transfer
from hvdlab.kernel_ext.base import PoolBase, Progress
from hvdlab.kernel_ext.cells.drive import CellHandle
from hvdlab.kernel_ext.cells.events import TimePassed
from hvdlab.kernel_ext.cells.results import CellResults
from hvdlab.kernel_ext.cells.sink import NullSink, OutputSink
from hvdlab.kernel_ext.inspect.looking import Looking
from hvdlab.kernel_ext.inspect.views import Ranks
from hvdlab.kernel_ext.leftovers import LeftCell
from hvdlab.kernel_ext.output.places import Whereabouts
from hvdlab.kernel_ext.output.record import Transcripts
from hvdlab.kernel_ext.payloads import (
    AskNames,
    AskStack,
    AskStatus,
    Complete,
    Completions,
    Inspect,
    Inspection,
    Names,
    Stack,
    Status,
)
from hvdlab.kernel_ext.recording import Recording, save_trace
from hvdlab.kernel_ext.status import RankStatus

if TYPE_CHECKING:
    from ipyparallel import Cluster  # type: ignore[import-untyped]  # has no types
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.kernel_ext.warm.ahead import WarmPool

ANSWER_WITHIN = 1.0
"""Seconds that a rank has to tell its status; its control thread does, whatever the rank is doing."""


class Pool(Looking):
    """Ranks. Made by :meth:`start`; all methods may be called from any thread.

    Attributes:
        launcher, plane: As they were asked for.
    """

    def __init__(self, base: PoolBase) -> None:
        self._base = base
        self.launcher, self.plane = base.launcher, base.plane
        self._changing = threading.RLock()
        self._stopped = False
        self._timeline: Recording | None = None
        # At exit, and when it is forgotten, it ends, unless it is kept.
        self._leave = weakref.finalize(self, base.leave)

    @classmethod
    def start(
        cls,
        np: int | None = None,
        *,
        launcher: str = "local",
        plane: str = "auto",
        hosts: str | None = None,
        warm: WarmPool | None = None,
        keep: str | None = None,
        timeout: float = 60,
        on_progress: Progress | None = None,
    ) -> Pool:
        """Start ranks and wait until all of them take cells.

        Args:
            np: How many; by default one for each usable core.
            launcher: ``local``, ``mpi`` or another of ipyparallel's launchers.
            plane: Data plane of the collectives, or ``auto``.
            hosts: ``a:4,b:4``, for launchers that start ranks on several hosts.
            warm: What :func:`hvdlab.kernel_ext.warm.prewarm` began; the pool takes it over, also if this fails.
            keep: A name, or an empty text to be given one: the ranks then outlive this process, until
                :meth:`stop`, and another one finds them by :meth:`attach`. Only for the launcher ``local``.
            timeout: Seconds.
            on_progress: Called with a short text at each step, on the calling thread.

        Raises:
            InvalidRequestError: This pool can't be had; nothing was started.
            StartError: Something did not start; nothing is left behind.
        """
        try:
            size = checks.check_size(checks.default_size() if np is None else np)
            with checks.limits_told("the pool could not be started"):
                base = PoolBase.start(
                    size,
                    launcher,
                    plane,
                    hosts or "",
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
        show: Callable[[LeftCell], OutputSink] | None = None,
        timeout: float = 60,
        on_progress: Progress | None = None,
    ) -> Pool:
        """Go on with a pool that was started with ``keep``, by a process that has ended or called :meth:`detach`.

        The ranks have all their variables. What they are running goes on.

        Args:
            name: What it is called; ``hvdlab pools`` on the command line lists them.
            show: Called with each cell whose end that process has not seen; where its output goes, the newest 4 MiB of
                each rank and what follows. :attr:`resumed` has these cells. Without it nothing is shown of them.
            timeout: Seconds.
            on_progress: As for :meth:`start`.

        Raises:
            InvalidRequestError: There is no pool of this name, or another process uses it; the text says which.
            StartError: It does not answer.
        """
        return cls(PoolBase.attach(name, Deadline(timeout), on_progress or _say_nothing, show))

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What a pool that outlives this process is called; empty for any other."""
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
        """Ranks that have ended, and why; :meth:`repair` starts them again."""
        members = self._base.group.members
        return {rank: m.reason for rank in members.lost if (m := members.get(rank)) is not None}

    def last_words(self, rank: int) -> str:
        """The last lines that a lost rank wrote to its standard error and nobody read, such as a crash report."""
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

        What happens while cells run is told under these. A sentence is given once.
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
        answers = runs.questions.ask(AskStatus, members.ready, Deadline(ANSWER_WITHIN))
        hosts = {member.rank: member.host for member in self.client.membership().members}
        found: list[RankStatus] = []
        for rank in members.wanted:
            member, answer = members.get(rank), answers.get(rank)
            if member is None:
                continue
            state = f"lost: {member.reason}" if member.reason else member.state.value
            if isinstance(answer, Status):
                found.append(_status(rank, hosts.get(rank, ""), member.pid, answer))
            else:
                state = "no answer" if rank in members.ready else state
                found.append(RankStatus(rank, hosts.get(rank, ""), member.pid, state=state))
        return found

    def where(self, ranks: Sequence[int] | None = None) -> Whereabouts:
        """Where these ranks (by default all) are: the Python stack of each, also while it runs a cell or hangs."""
        chosen = self._chosen(ranks)
        answers = self._base.runs.questions.ask(AskStack, chosen, Deadline(ANSWER_WITHIN))
        stacks = {rank: answer for rank, answer in answers.items() if isinstance(answer, Stack)}
        silent = [rank for rank in chosen if rank not in stacks]
        return Whereabouts(stacks, self._base.runs.lookout.look(silent) if silent else None)

    def names(self, ranks: Sequence[int] | None = None) -> dict[int, Names]:
        """The variables that the user has made on these ranks (by default all), in that order, and modules apart."""
        answers = self._base.runs.questions.ask(AskNames, self._chosen(ranks), Deadline(ANSWER_WITHIN))
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, Names)}

    @property
    def hanging(self) -> dict[int, str]:
        """Ranks that did not answer an interrupt, were given up, and still are in that cell, with its label."""
        given_up = self._base.runs.given_up
        if not given_up or self._stopped:
            return {}
        asked = [rank for rank in given_up if rank in self.ranks]
        for rank, answer in self._base.runs.questions.ask(AskStatus, asked, Deadline(ANSWER_WITHIN)).items():
            cell, _ = given_up[rank]
            if isinstance(answer, Status) and answer.cell != cell:
                self._base.runs.answers_again(rank, cell)
        return {rank: label for rank, (_, label) in self._base.runs.given_up.items()}

    # -- timeline -------------------------------------------------------------------------------------------------

    @property
    def timeline(self) -> Path | None:
        """The file that a timeline is being written to."""
        return self._timeline.path if self._timeline is not None else None

    def start_timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write what all ranks do from now on to a Chrome trace, also while cells run. Returns the file's whole path.

        Raises:
            InvalidRequestError: One is being written already.
            OSError: The file can't be created.
        """
        self._check_running()
        with self._changing:
            if self._timeline is not None:
                raise InvalidRequestError(
                    f"a timeline is being written to {self._timeline.path} already; stop it first."
                )
            self._timeline = Recording(self.client, Path(path).absolute())
            return self._timeline.path

    def stop_timeline(self) -> Path | None:
        """Complete the file that :meth:`start_timeline` began, and return it; None if there is none.

        Raises:
            OSError: The disk failed; the file holds what was written before.
        """
        with self._changing:
            recording, self._timeline = self._timeline, None
        if recording is None:
            return None
        recording.stop()
        return recording.path

    # -- cells ----------------------------------------------------------------------------------------------------

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        label: str = "",
        line_offset: int = 1,
        out: OutputSink | None = None,
        timeout: float | None = None,
        want_value: bool = True,
    ) -> CellResults:
        """Run a cell on ranks and wait for its end; an interrupt (Ctrl-C) interrupts the ranks.

        Nothing that the cell raises is raised here: ``results.errors`` and ``results.root_cause`` tell.

        Args:
            source: Python source, with IPython's magics and ``!``.
            ranks: Where; by default everywhere.
            label: How users know the cell, such as ``[7]``.
            line_offset: Lines of the notebook's cell above ``source``.
            out: Takes the output.
            timeout: Seconds after which the ranks are interrupted.
            want_value: Whether the last expression's values are wanted.

        Raises:
            InvalidRequestError: A rank does not exist or is lost, or the pool has stopped.
        """
        return self._dispatch(source, ranks, label, line_offset, out, timeout, want_value).wait()

    def start_run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        label: str = "",
        line_offset: int = 1,
        out: OutputSink | None = None,
        timeout: float | None = None,
        want_value: bool = True,
    ) -> CellHandle:
        """Like :meth:`run`, in the background: returns at once.

        Raises:
            StartError: There can be no thread for it. The cell was interrupted at once, and has ended.
        """
        handle = self._dispatch(source, ranks, label, line_offset, out, timeout, want_value)
        try:
            with checks.limits_told("the cell could not be run in the background"):
                handle.drive_in_background()
        except StartError:
            handle.interrupt()
            handle.wait()
            raise
        return handle

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Raise KeyboardInterrupt in what these ranks (by default all) are running, also inside a collective."""
        self._base.runs.interrupt(self._chosen(ranks))

    def _dispatch(
        self,
        source: str,
        ranks: Sequence[int] | None,
        label: str,
        line_offset: int,
        out: OutputSink | None,
        timeout: float | None,
        want_value: bool,
    ) -> CellHandle:
        cell, chosen = uuid.uuid4().hex[:12], self._chosen(ranks)
        recorder = self._base.transcripts.record(cell, label, chosen, NullSink() if out is None else out)
        try:
            handle = self._base.runs.dispatch(
                cell,
                chosen,
                source,
                label=label,
                line_offset=line_offset,
                sink=recorder,
                timeout=timeout,
                want_value=want_value,
            )
        except BaseException:
            self._base.transcripts.forget(cell)
            raise
        recorder.driven(lambda: handle.feed(TimePassed()))
        return handle

    # -- what was measured ----------------------------------------------------------------------------------------

    @overload
    def trace(self, *, arrow: Literal[False] = False) -> DataFrame: ...
    @overload
    def trace(self, *, arrow: Literal[True]) -> Any: ...
    def trace(self, *, arrow: bool = False) -> Any:
        """All collectives that were recorded, as a pandas table with a row per tensor, collective and rank.

        ``docs/reference/trace.md`` has the columns. The newest million rows are kept, from the first use on and with
        what the coordinator still has of the time before; ``table.attrs["dropped"]`` says how many rows are missing.

        Args:
            arrow: As a ``pyarrow.Table`` instead; ``table.schema.metadata`` has ``dropped`` then.

        Raises:
            ModuleNotFoundError: pandas, or pyarrow, is not installed.
        """
        recording = self.client.recording
        return recording.arrow() if arrow else recording.table()

    def metrics(self) -> DataFrame:
        """All that the ranks measured, as a pandas table with a row per point.

        The columns are ``rank``, ``name``, ``time`` (seconds since the origin of :meth:`trace`), ``value``, ``step``
        (missing if none was said) and ``unit``. The newest points of each series are kept;
        ``table.attrs["dropped"]`` says how many are missing.
        """
        return self.client.recording.metrics()

    def save_trace(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write everything that :meth:`trace` would have now, with cells, metrics and lost ranks, for a trace viewer.

        Args:
            path: A name that ends in ``.json`` or ``.json.gz`` (Chrome's format) or ``.pftrace`` (Perfetto's, the smallest).
            format: One of these, for a file whose name says something else.

        Returns:
            The file's whole path.

        Raises:
            InvalidRequestError: There is no such format.
            OSError: It could not be written; a file that was there stays as it was.
        """
        return save_trace(self.client, path, format)

    # -- variables ------------------------------------------------------------------------------------------------

    def push(self, /, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Bind variables on these ranks (by default all), after what they are running.

        Raises:
            HvdlabError: A value can't be pickled, or a rank could not unpickle it.
        """
        transfer.push(self._base.runs.questions, values, self._chosen(ranks), near=self._near())

    def pull(self, name: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """The value of a variable or expression on these ranks (by default all), by rank.

        Raises:
            LookupError: It does not exist on a rank, can't be sent, or there is no memory for it here.
        """
        return transfer.pull(self._base.runs.questions, name, self._chosen(ranks), near=self._near())

    def complete(
        self, code: str, cursor: int, *, rank: int | None = None, timeout: float = 2
    ) -> Completions | None:
        """Completions from a rank's variables (by default the first one's); ``None`` if it is busy."""
        answers = self._base.runs.questions.ask(
            lambda ticket: Complete(ticket, code, cursor), self._one(rank), Deadline(timeout)
        )
        return next((a for a in answers.values() if isinstance(a, Completions)), None)

    def inspect(
        self, code: str, cursor: int, detail: int = 0, *, rank: int | None = None, timeout: float = 2
    ) -> Inspection | None:
        """Documentation from a rank's variables (by default the first one's); ``None`` if it is busy."""
        answers = self._base.runs.questions.ask(
            lambda ticket: Inspect(ticket, code, cursor, detail), self._one(rank), Deadline(timeout)
        )
        return next((a for a in answers.values() if isinstance(a, Inspection)), None)

    def _near(self) -> set[int]:
        """Ranks that share memory with this process."""
        return {m.rank for m in self.client.membership().members if m.host == host_key()}

    def _one(self, rank: int | None) -> tuple[int, ...]:
        return self._chosen(self.ranks[:1] if rank is None else [rank])

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

    # -- size -----------------------------------------------------------------------------------------------------

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

    # -- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all ranks and everything that belongs to the pool. Idempotent; runs in flight end with dead ranks."""
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
            InvalidRequestError: It was started without.
        """
        if not self.name:
            raise InvalidRequestError(
                "these ranks end with this process; only a pool that was started with keep= "
                "(`%hvd_pool start --keep`) can be left to itself"
            )
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
    )


def _say_nothing(text: str) -> None:
    """Nobody wants to know."""

"""Pool of ranks that stay alive between cells, with all operations of a notebook or a script on them."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.decision_log import line_of
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.protocol.messages import Decision
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import LEAVES
from hvdlab.kernel_ext.notebook import assembly
from hvdlab.kernel_ext.notebook.assembly import PoolParts, Progress
from hvdlab.kernel_ext.notebook.cells.cell_events import DeadlineReached
from hvdlab.kernel_ext.notebook.cells.dispatch import CellRequest
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults, ImportDisplay
from hvdlab.kernel_ext.notebook.cells.sink import Sinks
from hvdlab.kernel_ext.notebook.elastic import Bounds, SyncResult, sync_cell
from hvdlab.kernel_ext.notebook.kept_pools import OrphanedCell, launcher_of
from hvdlab.kernel_ext.notebook.membership import ElasticState
from hvdlab.kernel_ext.notebook.output.stack_text import RankLocations
from hvdlab.kernel_ext.notebook.output.transcript import ShowLate, TranscriptStore
from hvdlab.kernel_ext.notebook.prestart import end_uninterrupted
from hvdlab.kernel_ext.notebook.requests import A
from hvdlab.kernel_ext.notebook.stack_probe import NativeStacks, native_stacks
from hvdlab.kernel_ext.notebook.stdin import ProcessPrompter, Prompter
from hvdlab.kernel_ext.notebook.trace_file import TraceFileWriter, save_trace
from hvdlab.kernel_ext.notebook.variables import transfer
from hvdlab.kernel_ext.notebook.variables.diff import Diff, diff
from hvdlab.kernel_ext.notebook.variables.overview import BUDGET, Overview, Ranks, TensorTable
from hvdlab.kernel_ext.wire.channel import RankRequest
from hvdlab.kernel_ext.wire.compare import (
    SPECIAL,
    AskTensors,
    AskVariables,
    AskView,
    Tensors,
    Variables,
    VariableView,
)
from hvdlab.kernel_ext.wire.status import (
    AskNames,
    AskStack,
    AskStatus,
    Complete,
    Completions,
    EvaluateExpressions,
    ExpressionValues,
    Inspect,
    Inspection,
    RankStatus,
    Stack,
    Status,
    UserNames,
    rank_status,
)
from hvdlab.launch.starter import Capability

if TYPE_CHECKING:
    from ipyparallel import Cluster  # type: ignore[import-untyped]  # has no types
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.collectives.tracing.recording import Recording
    from hvdlab.kernel_ext.notebook.prestart import Prestart

LOOK_WITHIN = 7.0
"""Seconds that the pool waits for ranks that look at something; they give up by themselves before that."""
ANSWER_WITHIN = 1.0
"""Seconds that a rank has to answer; its control thread does, also while the rank runs a cell."""


STORY_LINES = 4
"""Decisions about a rank that died in the report of a cell: its death, the launcher's better reason for it, and aborts."""


class Pool:
    """Ranks of one user. All methods may be called from any thread.

    ``Pool.start(8)`` starts ranks, and ``Pool.attach("mine")`` finds those of a kept pool; ``hvdlab.pool()`` is the pool of the
    notebook's own magics. As a context manager it stops the ranks at the end of the block.

    Args:
        parts: The processes and connections that :meth:`start` or :meth:`attach` has put together.

    Attributes:
        launcher, plane: The names that the caller of :meth:`start` gave.
        replaceable: Whether the launcher can start single ranks, so that lost ones can be replaced.

    Example:
        >>> import hvdlab
        >>> with hvdlab.Pool.start(1) as pool:
        ...     results = pool.run("6 * 7")
        ...     results[0]
        42
    """

    def __init__(self, parts: PoolParts) -> None:
        self._parts, self._group, self._runs = parts, parts.group, parts.runs
        self._requests, self._admission = parts.runs.requests, parts.admission
        self.launcher, self.plane = parts.launcher, parts.plane
        self.replaceable = Capability.SINGLE_RANKS in parts.launch.capabilities
        # Held while the number of ranks changes, or the pool ends.
        self._changing = threading.RLock()
        self._stopped = False
        self._timeline: TraceFileWriter | None = None
        # The ranks of which the user knows that they did not answer for the recording.
        self._silent: tuple[int, ...] = ()
        # When this process exits, or the pool is garbage-collected, the ranks end, unless the pool is kept.
        self._detach = weakref.finalize(self, parts.detach)

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
            warm: Processes that :meth:`hvdlab.kernel_ext.notebook.prestart.Prestart.begin` began; the pool takes them over, and closes them if
                this fails.
            keep: A name for the pool; with an empty text the pool chooses one. The ranks then outlive this process, until
                :meth:`stop`, and another process finds them by :meth:`attach`. Only for the launchers ``local`` and ``ray``.
            timeout: Seconds for the whole start.
            on_progress: Called with a short text at each step, on the calling thread.

        Raises:
            InvalidRequestError: The arguments don't fit each other or this host; nothing was started.
            StartError: Something did not start, or not in time; nothing is left behind.
        """
        assembly.open_standard_streams()
        try:
            assembly.check_not_in_rank()
            size = assembly.check_size(assembly.default_size() if np is None else np)
            with assembly.limits_explained("the pool could not be started"):
                parts = PoolParts.start(
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
        return cls(parts)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        launcher: str | None = None,
        show: Callable[[OrphanedCell], Sinks] | None = None,
        timeout: float = 60,
        on_progress: Progress | None = None,
    ) -> Pool:
        """Go on with a pool that was started with ``keep``, by a process that has ended or called :meth:`detach`.

        The ranks have all their variables. Cells that they are running go on.

        Args:
            name: The pool's name; ``hvdlab pools`` on the command line lists them.
            launcher: The pool's launcher. By default the pool is looked for on this host, and on the Ray cluster that this process is
                connected to or that ``RAY_ADDRESS`` names; ``ray`` also finds a cluster that runs on this host.
            show: Called with each cell whose end the former process has not seen; it returns the sink for the cell's output, or several:
                the newest 4 MiB of each rank and what follows. :attr:`resumed` has these cells. Without it nothing is
                shown of them, and only elastic cells that run are among these: ranks go on joining and leaving them.
            timeout: Seconds.
            on_progress: As for :meth:`start`.

        Raises:
            InvalidRequestError: There is no pool of this name, or another process uses it; the text names that process.
            StartError: The pool does not answer.
        """
        found = launcher or launcher_of(name)
        return cls(PoolParts.attach(name, found, Deadline(timeout), on_progress or _say_nothing, show))

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Return the name of a pool that outlives this process; empty for any other pool."""
        return self._parts.keeping.name if self._parts.keeping is not None else ""

    @property
    def ranks(self) -> Ranks:
        """Ranks that live and take cells, as numbers; ``ranks[3]`` is a view of rank 3's variables."""
        return Ranks(() if self._stopped else self._group.ready(), self)

    @property
    def resumed(self) -> tuple[CellHandle, ...]:
        """Cells that :meth:`attach` found and has gone on with."""
        return tuple(self._parts.resumed)

    @property
    def size(self) -> int:
        """Number of ranks that the pool is made of, lost ones included."""
        return 0 if self._stopped else len(self._group.members.wanted)

    @property
    def lost(self) -> dict[int, str]:
        """Rank to the reason of its end, for ranks that have ended; :meth:`repair` starts them again."""
        members = self._group.members
        return {rank: m.reason for rank in members.lost if (m := members.get(rank)) is not None}

    def last_words(self, rank: int) -> str:
        """Return the last lines of a lost rank's standard error that were left unread when it ended, such as a crash report.

        Args:
            rank: The rank.

        Returns:
            The lines; empty for a rank that lives, left nothing unread, or does not exist.
        """
        member = self._group.members.get(rank)
        return member.tail if member is not None else ""

    @property
    def state(self) -> str:
        """``idle``, ``running``, ``starting`` (also while the size changes) or ``stopped``."""
        if self._stopped:
            return "stopped"
        if not self._changing.acquire(blocking=False):
            return "starting"
        self._changing.release()
        return "running" if self._runs.active else "idle"

    @property
    def broken(self) -> str:
        """Why nothing can be done with the pool any more but to stop it; empty if all is well."""
        return "" if self._stopped else self._parts.broken

    def news(self) -> list[str]:
        """Return sentences about events while no cell was running, such as a coordinator that was replaced.

        Events while cells run are shown under these cells. Each sentence is returned once.
        """
        return [] if self._stopped else self._runs.take_notices()

    @property
    def client(self) -> Client:
        """Return the connection to the coordinator."""
        return self._parts.client

    @property
    def transcripts(self) -> TranscriptStore:
        """Return the output of this pool's cells."""
        return self._parts.transcripts

    @property
    def cluster(self) -> Cluster:
        """Return the ``ipyparallel.Cluster`` of these ranks. The first use waits until its controller is up (about 1 s)."""
        self._check_running()
        return self._parts.companion.cluster

    def status(self) -> list[RankStatus]:
        """Return the status of each rank, whether or not it runs a cell. Takes a second at most.

        Returns:
            One entry per rank, lost ones included. A rank that does not answer has the state ``no answer``.

        Raises:
            InvalidRequestError: The pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        self._check_running()
        members = self._group.members
        there = tuple(sorted({*members.ready, *members.let_go}))
        answers = self._ask(Status, AskStatus, there)
        hosts = {member.rank: member.host for member in self.client.membership().members}
        found: list[RankStatus] = []
        for rank in sorted({*members.wanted, *members.let_go}):
            member, answer = members.get(rank), answers.get(rank)
            if member is None:
                continue
            state = f"lost: {member.reason}" if member.reason else member.state.value
            if answer is not None:
                status = rank_status(rank, hosts.get(rank, ""), member.pid, answer)
                found.append(
                    replace(status, state=f"{status.state}, {LEAVES}") if member.at_commit else status
                )
            else:
                state = "no answer" if rank in there else state
                found.append(RankStatus(rank, hosts.get(rank, ""), member.pid, state=state))
        return found

    def story(self, last: int = 20, *, rank: int | None = None, name: str = "") -> tuple[Decision, ...]:
        """Return the coordinator's newest decisions and the entries that led to them, oldest first.

        Args:
            last: How many decisions there are at most, apart from their causes.
            rank: The rank that they are about; None for any.
            name: The tensor that they are about; empty for any.

        Raises:
            CoordinatorLostError: The connection to the coordinator is lost.
            TimeoutError: The coordinator did not answer.
        """
        self._check_running()
        return self.client.story(last, rank=rank, name=name)

    def explain(self, results: CellResults) -> None:
        """Fill ``results.story`` with the coordinator's decisions that led to the failure, if it made any. Waits for a second at most.

        Args:
            results: The results of a cell that failed; those of a cell that ended well stay as they are.
        """
        cause = results.root_cause
        if cause is None or self._stopped:
            return
        decided = [error.decision for rank in cause.ranks if (error := results.errors.get(rank)) is not None]
        with contextlib.suppress(CoordinatorLostError, TimeoutError):  # the report is complete without them
            if cause.ename == "RankDied":
                found = _of_last_death(
                    self.client.story(STORY_LINES, rank=cause.ranks[0], timeout=ANSWER_WITHIN)
                )
            elif decided and decided[0]:
                found = self.client.story(1, decision=decided[0], timeout=ANSWER_WITHIN)
            else:
                return
            results.story = tuple(line_of(entry) for entry in found)

    def elastic(self) -> ElasticState:
        """Return which ranks there are, since when and from where, which the pool still waits for, and what became of the others.

        Raises:
            InvalidRequestError: The pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        self._check_running()
        return self._admission.state(self.newcomers)

    def on_membership_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have a function called after each change of what :meth:`elastic` returns.

        Args:
            callback: Called without arguments, on any thread. It must not block.

        Returns:
            A function that ends that. A call that is already under way may still come afterwards.
        """
        return self._parts.history.listen(callback)

    @property
    def first_to_fail(self) -> int | None:
        """Return the rank that failed first in the last cell that did not end well; None if there was none."""
        return self._runs.first_to_fail

    @property
    def hanging(self) -> dict[int, str]:
        """Rank to the label of its cell, for ranks that were given up after an interrupt and still are in that cell."""
        abandoned = self._runs.abandoned
        if not abandoned or self._stopped:
            return {}
        asked = [rank for rank in abandoned if rank in self.ranks]
        for rank, answer in self._ask(Status, AskStatus, asked).items():
            if answer.cell != (cell := abandoned[rank][0]):
                self._runs.no_longer_abandoned(rank, cell)
        # Read again: the answers have taken out the ranks that have left their cells.
        return {rank: label for rank, (_, label) in self._runs.abandoned.items()}

    # -- variables ------------------------------------------------------------------------------------------------

    def push(self, /, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Bind variables on ranks; a rank does it once the cell that it runs has ended.

        Args:
            ranks: Ranks that get them, such as ``[0, 2]``; by default all that live.
            **values: The variables by their names. Each rank gets copies, sent by cloudpickle.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
            HvdlabError: A value can't be pickled, or a rank could not unpickle it.
        """
        transfer.push(
            self._requests,
            values,
            self._chosen(ranks),
            near=self._group.ranks_on_this_host(),
        )

    def pull(
        self, name: str, ranks: Sequence[int] | None = None, *, imports: ImportDisplay | None = None
    ) -> dict[int, Any]:
        """Evaluate an expression on ranks and return its values.

        Args:
            name: A variable or expression, evaluated in each rank's notebook namespace.
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.
            imports: Shows which modules the values import in this process; None shows nothing.

        Returns:
            A dict from rank to value. Values are copies, sent by pickle; CUDA tensors arrive on the CPU.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
            LookupError: The value does not exist on a rank, can't be sent, or there is no memory for it in this process.
        """
        return transfer.pull(
            self._requests,
            name,
            self._chosen(ranks),
            near=self._group.ranks_on_this_host(),
            imports=imports,
        )

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

    def diff(self, name: str = "", ranks: Sequence[int] | None = None, *, special: str = "") -> Diff:
        """Compare a variable or expression over these ranks (by default all), after the cells that they are running.

        Ranks make the fingerprints and compare the elements; only the result comes to this process.

        Args:
            name: The expression.
            ranks: The ranks to compare, such as ``[0, 2]``; by default all that live.
            special: ``rng`` (states of random numbers) or ``environment`` (versions and settings), instead of a name.

        Returns:
            The groups of ranks that are equal, and where the others differ.

        Raises:
            InvalidRequestError: Not exactly one of ``name`` and ``special`` was given, or a rank is lost or does not exist.
            HvdlabError: A rank was lost meanwhile.
        """
        if bool(name) == bool(special) or special not in ("", *SPECIAL):
            raise InvalidRequestError(
                f"diff takes the name of a variable, or special= with one of {', '.join(SPECIAL)}"
            )
        questions = self._requests
        return diff(
            questions, name, self._chosen(ranks), special=special, near=self._group.ranks_on_this_host()
        )

    def view(self, expression: str, ranks: Sequence[int] | None = None) -> dict[int, VariableView]:
        """Return a description of an expression's value on each rank, also while it runs a cell.

        Args:
            expression: A variable or expression, evaluated in each rank's notebook namespace.
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.

        Returns:
            A dict from rank to description. Ranks that do not answer within seven seconds are missing.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return self._ask(
            VariableView, lambda ticket: AskView(ticket, expression), self._chosen(ranks), LOOK_WITHIN
        )

    def variables(self, ranks: Sequence[int] | None = None) -> Overview:
        """Return the user's variables on ranks, and where they differ; also while cells run.

        Args:
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.

        Returns:
            The variables, and the ranks that did not answer within seven seconds.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        chosen = self._chosen(ranks)
        found = self._ask(Variables, lambda ticket: AskVariables(ticket, BUDGET), chosen, LOOK_WITHIN)
        return Overview(found, tuple(rank for rank in chosen if rank not in found))

    def tensors(self, ranks: Sequence[int] | None = None, *, most: int = 20) -> TensorTable:
        """Return the largest arrays and tensors on each rank, also while cells run.

        Args:
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.
            most: How many there are at most for each rank.

        Returns:
            A table. Ranks that do not answer within seven seconds are missing.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return TensorTable(
            self._ask(Tensors, lambda ticket: AskTensors(ticket, most), self._chosen(ranks), LOOK_WITHIN)
        )

    def native(self, ranks: Sequence[int] | None = None) -> NativeStacks:
        """Return where ranks of this host are, with the frames below Python. Takes seconds.

        Args:
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.

        Returns:
            The stacks by rank. Ranks of other hosts are missing.

        Raises:
            InvalidRequestError: py-spy is not installed, none of these ranks is on this host, one is lost or does not exist, or the
                pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        chosen, near = self._chosen(ranks), self._group.ranks_on_this_host()
        pids = {m.rank: m.pid for m in self._parts.client.membership().members if m.rank in chosen}
        here = {rank: pid for rank, pid in sorted(pids.items()) if rank in near}
        if not here:
            raise InvalidRequestError("native frames can be read of ranks on this host only")
        return native_stacks(here)

    # -- requests to ranks -----------------------------------------------------------------------------------------------

    def where(self, ranks: Sequence[int] | None = None) -> RankLocations:
        """Return where ranks are: the Python stack of each, also while it runs a cell or hangs.

        Args:
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.

        Returns:
            The stacks by rank. For a rank that does not answer within a second there is the state of its process.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        chosen = self._chosen(ranks)
        stacks = self._ask(Stack, AskStack, chosen)
        silent = [rank for rank in chosen if rank not in stacks]
        return RankLocations(stacks, self._runs.stack_probe.describe_processes(silent) if silent else None)

    def names(self, ranks: Sequence[int] | None = None) -> dict[int, UserNames]:
        """Return the names that the user has made on each rank, in that order, modules apart.

        Args:
            ranks: Ranks to ask, such as ``[0, 2]``; by default all that live.

        Returns:
            A dict from rank to names. Ranks that do not answer within a second are missing.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return self._ask(UserNames, AskNames, self._chosen(ranks))

    def complete(
        self, code: str, cursor: int, *, rank: int | None = None, timeout: float = 2
    ) -> Completions | None:
        """Return completions from a rank's variables.

        Args:
            code: The code to complete.
            cursor: Position in it, in characters.
            rank: The rank to ask; by default the first one that lives.
            timeout: Seconds to wait for its answer.

        Returns:
            The completions; ``None`` without an answer in time.

        Raises:
            InvalidRequestError: The rank is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return self._ask_one(Completions, lambda ticket: Complete(ticket, code, cursor), rank, timeout)

    def inspect(
        self, code: str, cursor: int, detail: int = 0, *, rank: int | None = None, timeout: float = 2
    ) -> Inspection | None:
        """Return the documentation of a name from a rank's variables.

        Args:
            code: The code that has the name.
            cursor: Position in it, in characters.
            detail: 0 for the docstring, 1 for the source as well, as in Jupyter's protocol.
            rank: The rank to ask; by default the first one that lives.
            timeout: Seconds to wait for its answer.

        Returns:
            The documentation; ``None`` without an answer in time.

        Raises:
            InvalidRequestError: The rank is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return self._ask_one(Inspection, lambda ticket: Inspect(ticket, code, cursor, detail), rank, timeout)

    def express(
        self, expressions: Mapping[str, str], *, rank: int | None = None, timeout: float = 10
    ) -> dict[str, Any] | None:
        """Return the values of expressions on a rank, as Jupyter's protocol has them.

        Args:
            expressions: The expressions by the names of their results.
            rank: The rank to ask; by default the first one that lives.
            timeout: Seconds to wait for its answer.

        Returns:
            The results by name; ``None`` without an answer in time.

        Raises:
            InvalidRequestError: The rank is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        asked = dict(expressions)
        answer = self._ask_one(
            ExpressionValues, lambda ticket: EvaluateExpressions(ticket, asked), rank, timeout
        )
        return answer.results if answer is not None else None

    def _ask(
        self,
        kind: type[A],
        make: Callable[[int], RankRequest],
        ranks: Sequence[int],
        within: float | None = None,
    ) -> dict[int, A]:
        seconds = ANSWER_WITHIN if within is None else within
        return self._requests.ask_for(kind, make, ranks, Deadline(seconds))

    def _ask_one(
        self, kind: type[A], make: Callable[[int], RankRequest], rank: int | None, within: float
    ) -> A | None:
        chosen = self._chosen(self.ranks[:1] if rank is None else [rank])
        return next(iter(self._ask(kind, make, chosen, within).values()), None)

    # -- cells -----------------------------------------------------------------------------------------------------------

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        label: str = "",
        line_offset: int = 0,
        out: Sinks = None,
        timeout: float | None = None,
        want_value: bool = True,
        store_history: bool = False,
        file: str = "",
        prompter: Prompter | None = None,
        late: ShowLate | None = None,
        elastic: Bounds | None = None,
    ) -> CellResults:
        """Run a cell on ranks and wait for its end; an interrupt (Ctrl-C) interrupts the ranks.

        Nothing that the cell raises is raised here: ``results.errors`` and ``results.root_cause`` have it.

        Args:
            source: Python source, with IPython's magics and ``!``.
            ranks: The ranks that run it; by default all.
            label: The name that users know the cell by, such as ``[7]``.
            line_offset: Lines of the notebook's cell above ``source``, such as that of its magic: errors count from the cell's first line.
            out: A sink of the output, or several; without one nothing is shown, and the output is only kept.
            timeout: Seconds after which the ranks are interrupted; None for no limit.
            want_value: Whether ranks send the value of the last expression.
            store_history: Whether the cell is one of a notebook's: its source becomes ``In[n]`` on the ranks and its value ``_`` and
                ``Out[n]``, which keeps the value alive. By default not: in a program's loop each call would add to the ranks' memory.
            file: Name in a frontend's debugger of the cell that ``source`` is the end of.
            prompter: Asks the user when a rank reads input (``input()``, a debugger), if this is the main thread; by
                default where this process has its input.
            late: Shows output of the cell's threads and tasks after its end, ``late(rank, chunks)``; called on a thread
                of the pool's, and must not block. The output is kept in any case.
            elastic: The cell trains by an elastic function, and goes on while ranks are lost, replaced, added and let go,
                as long as there are this many; it runs on all ranks.

        Returns:
            The value or the error of each rank.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return self.run_cell(
            CellRequest(
                source,
                ranks=ranks,
                label=label,
                line_offset=line_offset,
                out=out,
                timeout=timeout,
                want_value=want_value,
                store_history=store_history,
                file=file,
                prompter=prompter or ProcessPrompter(),
                late=late,
                elastic=elastic,
            )
        )

    def run_cell(self, request: CellRequest) -> CellResults:
        """Run a cell on ranks and wait for its end, as :meth:`run` does.

        Args:
            request: The cell, with the arguments of :meth:`run`.

        Returns:
            The value or the error of each rank.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        return self._dispatch(request).wait()

    def start_run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        label: str = "",
        line_offset: int = 0,
        out: Sinks = None,
        timeout: float | None = None,
        want_value: bool = True,
        store_history: bool = False,
        file: str = "",
        late: ShowLate | None = None,
        elastic: Bounds | None = None,
    ) -> CellHandle:
        """Run a cell in the background.

        Args:
            source, ranks, label, line_offset, out, timeout, want_value, store_history, file, late, elastic: As for :meth:`run`.

        Returns:
            A handle at once; its ``wait()`` returns the results.

        Raises:
            InvalidRequestError: As for :meth:`run`.
            StartError: No thread could be started for it. The cell was interrupted at once, and has ended.
        """
        return self.start_cell(
            CellRequest(
                source,
                ranks=ranks,
                label=label,
                line_offset=line_offset,
                out=out,
                timeout=timeout,
                want_value=want_value,
                store_history=store_history,
                file=file,
                late=late,
                elastic=elastic,
            )
        )

    def start_cell(self, request: CellRequest) -> CellHandle:
        """Run a cell in the background, as :meth:`start_run` does.

        Args:
            request: The cell, with the arguments of :meth:`run`.

        Returns:
            A handle at once; its ``wait()`` returns the results.

        Raises:
            InvalidRequestError, StartError: As for :meth:`start_run`.
        """
        handle = self._dispatch(request)
        try:
            with assembly.limits_explained("the cell could not be run in the background"):
                handle.drive_in_background()
        except StartError:
            handle.interrupt()
            handle.wait()
            raise
        return handle

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Raise KeyboardInterrupt in the cells of ranks, also inside a collective.

        Args:
            ranks: Ranks to interrupt, such as ``[0, 2]``; by default all that live.

        Raises:
            InvalidRequestError: One of these ranks is lost or does not exist, or the pool has stopped.
            StartError: The pool has broken down; :attr:`broken` has the reason.
        """
        self._runs.interrupt(self._chosen(ranks))

    def _dispatch(self, request: CellRequest) -> CellHandle:
        cell, chosen = secrets.token_hex(6), self._chosen(request.ranks)
        if request.elastic is not None:
            request.elastic.check()
            request.elastic.check_size(len(chosen), request.label)
        recorder = self._parts.transcripts.record(cell, request.label, chosen, request.out)
        recorder.show_late(request.late)
        try:
            handle = self._runs.dispatch(cell, chosen, request, recorder)
        except BaseException:
            self._parts.transcripts.forget(cell)
            raise
        recorder.driven(lambda: handle.post(DeadlineReached()))
        return handle

    # -- number of ranks -------------------------------------------------------------------------------------------------

    def resize(self, np: int, *, timeout: float = 60) -> None:
        """Change the number of ranks. Those that stay keep their process and variables.

        While an elastic cell runs, ranks that are added get the others' variables and take part in it, and ranks
        that are too many leave at their next commit, so that no step is lost.

        Ranks are numbered from 0, so those with the highest numbers leave.

        Args:
            np: The number of ranks from now on.
            timeout: Seconds for the whole change.

        Raises:
            InvalidRequestError: The pool can't have this size, or a rank that lives would end while a lost one stays; nothing has
                changed.
            StartError: A new rank did not start within ``timeout`` seconds; the others are as before. Or a rank that leaves did not
                come to a commit by then: it leaves when it does, and only then the pool can be resized again.
        """
        self._check_running()
        wanted = assembly.check_size(np)
        with self._changing, assembly.limits_explained(f"the pool could not get {wanted} ranks"):
            self._parts.check_resizable(wanted)
            self._admission.check_size(wanted)
            self._parts.check_dropped(wanted)
            deadline, before = Deadline(timeout), self._group.ready()
            leaving = tuple(rank for rank in before if rank >= wanted) if self._runs.elastic() else ()
            if leaving:
                self._runs.ranks_leave_at_commit(leaving)
            if leaving or self._group.members.let_go:  # an earlier call may not have waited long enough
                staying = [rank for rank in self._group.members.wanted if rank < wanted]
                try:
                    self._group.shrink_at_commit(staying, deadline)
                finally:
                    self._parts.update_kept_entry()  # the ranks have been let go, also if they have not left in time
            self._group.set_ranks(range(wanted), deadline)
            # A new rank can be ready over the next connection to a coordinator before those that stay were sent the size again.
            self._parts.rebuilder.await_recovered(deadline.remaining())
            new = [rank for rank in self._group.ready() if rank not in before]
            self._admission.ranks_added("resize", new)
            self._parts.update_kept_entry()
            self._admission.admit_to_elastic_cells(new, timeout)

    def repair(self, *, timeout: float = 60) -> tuple[int, ...]:
        """Start lost ranks again under their old numbers, with empty memory.

        While an elastic cell runs, they get the state of the others and take part in it.

        Args:
            timeout: Seconds until they take cells.

        Returns:
            The ranks that were lost; empty if none was.

        Raises:
            InvalidRequestError: The launcher can't start single ranks.
            StartError: A rank did not start within ``timeout`` seconds; it stays lost.
        """
        self._check_running()
        deadline = Deadline(timeout)
        with self._changing:
            self._group.await_disconnected(deadline)
            lost = self._group.members.lost
            if lost:
                self._parts.check_replaceable()
                self._group.set_ranks(self._group.members.wanted, deadline, replace_lost=True)
                self._admission.ranks_added("repair", lost)
                self._admission.admit_to_elastic_cells(lost, timeout)
            return lost

    def restart(self, ranks: Sequence[int] | None = None, *, timeout: float = 60) -> None:
        """End ranks, whatever they are doing, and start them again with empty memory.

        Args:
            ranks: Ranks to start again, such as ``[0, 2]``; by default all, lost ones included.
            timeout: Seconds until they take cells.

        Raises:
            InvalidRequestError: One of them does not exist, or the launcher can't start single ranks.
            StartError: A rank did not start within ``timeout`` seconds, and is lost; or one did not end by SIGKILL in that time.
        """
        self._check_running()
        with self._changing:
            self._parts.check_replaceable()
            wanted = self._group.members.wanted
            chosen = wanted if ranks is None else tuple(ranks)
            if unknown := sorted(set(chosen) - set(wanted)):
                raise InvalidRequestError(
                    f"there is no rank {unknown[0]}; the pool has {format_ranks(wanted)}."
                )
            deadline = Deadline(timeout)
            self._group.end(chosen, deadline)
            self._group.set_ranks(wanted, deadline, replace_lost=True)
            self._admission.ranks_added("restart", chosen)
            self._admission.admit_to_elastic_cells(chosen, timeout)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Living ranks that were started after others, and to which :meth:`sync` has brought nothing yet."""
        newcomers = self._parts.newcomers.all()
        return tuple(rank for rank in self._group.ready() if rank in newcomers)

    def sync(
        self,
        ranks: Sequence[int] | None = None,
        *,
        source: int | None = None,
        without: Collection[str] = (),
        timeout: float | None = None,
    ) -> SyncResult:
        """Copy one rank's variables and imported modules to others; variables of that name there are replaced.

        Values travel from rank to rank as collectives do, once for all ranks together. Objects that belong together
        stay so: an optimizer has the parameters of its model. A ``DistributedOptimizer`` reduces gradients again. Gradients
        and states of random number generators stay behind; tensors come to the device of the same name. It runs as a
        cell on all ranks, after the cells that they run.

        Args:
            ranks: The ranks that get it; by default :attr:`newcomers`.
            source: The rank that it comes from; by default the first one that is not in ``ranks``.
            without: UserNames of variables to leave out.
            timeout: Seconds after which the copying is interrupted; None for no limit.

        Returns:
            The names that were copied, and those that could not be, with the reasons.

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
        if lost := sorted(self.lost):  # a newcomer's hvd.init() would wait for it
            raise InvalidRequestError(
                f"{format_ranks(lost)} {'is' if len(lost) == 1 else 'are'} lost, and the world is complete only with all of its "
                "ranks; `%hvd_pool repair` or pool.repair() comes first."
            )
        begin = time.monotonic()
        cell = sync_cell(source, targets, without)
        results = self.run(cell, label="sync", timeout=timeout)
        if (ran := self._parts.transcripts.find("sync")) is not None:  # `%hvd_output` is of the user's cells
            self._parts.transcripts.forget(ran.transcript.cell)
        if not results.ok:
            cause = results.root_cause
            raise HvdlabError(
                f"nothing was brought: {cause.evalue if cause is not None else 'it was interrupted'}"
            )
        values = {rank: results.value(rank) for rank in (source, *targets)}
        done = SyncResult.of(source, targets, values, time.monotonic() - begin)
        self._parts.newcomers.mark_synced(targets)
        return done

    # -- spans and metrics -----------------------------------------------------------------------------------------------

    @property
    def timeline(self) -> Path | None:
        """Return the file that a timeline is being written to."""
        return self._timeline.path if self._timeline is not None else None

    def start_timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write what all ranks do from now on to a Chrome trace, also while cells run.

        Args:
            path: File to create, or to overwrite.

        Returns:
            The file's whole path.

        Raises:
            InvalidRequestError: A timeline is being written already.
            OSError: The file can't be created.
        """
        self._check_running()
        with self._changing:
            if self._timeline is not None:
                raise InvalidRequestError(
                    f"a timeline is being written to {self._timeline.path} already; stop it first."
                )
            self._timeline = TraceFileWriter(self.client, Path(path).absolute())
            return self._timeline.path

    def stop_timeline(self) -> Path | None:
        """Complete the file that :meth:`start_timeline` began, and return it; None if there is none.

        Raises:
            OSError: The disk failed; the file holds the events that were written before.
        """
        with self._changing:
            recording, self._timeline = self._timeline, None
        if recording is None:
            return None
        recording.stop()
        self._note_silent(self.client.recording)
        return recording.path

    @overload
    def trace(self, *, arrow: Literal[False] = False) -> DataFrame: ...

    @overload
    def trace(self, *, arrow: Literal[True]) -> Any: ...

    def trace(self, *, arrow: bool = False) -> Any:
        """Return all collectives that were recorded, as a pandas table with a row per tensor, collective and rank.

        It has all that the ranks did before the call. ``docs/reference/trace.md`` has the columns. The newest million rows are
        kept, from the first use on and with the past events that the coordinator still has; ``table.attrs["dropped"]`` is the
        number of rows that are missing, and ``table.attrs["silent"]`` has the ranks that did not answer within a second.

        Args:
            arrow: Return a ``pyarrow.Table`` instead; ``table.schema.metadata`` has ``dropped`` then.

        Raises:
            ModuleNotFoundError: pandas, or pyarrow, is not installed.
        """
        recording = self._gathered()
        return recording.arrow() if arrow else recording.table()

    def metrics(self) -> DataFrame:
        """Return all that the ranks measured, as a pandas table with a row per point.

        The columns are ``rank``, ``name``, ``time`` (seconds since the origin of :meth:`trace`), ``value``, ``step``
        (missing if none was given) and ``unit``. The newest points of each series are kept;
        ``table.attrs["dropped"]`` says how many are missing.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        return self._gathered().metrics()

    def _gathered(self) -> Recording:
        recording = self.client.gathered()
        self._note_silent(recording)
        return recording

    def _note_silent(self, recording: Recording) -> None:
        """Show the user which ranks did not answer when the recording was gathered; once, if it is gathered again and again."""
        if recording.silent and recording.silent != self._silent:
            self._runs.notice(
                f"{format_ranks(recording.silent)} did not answer: the newest spans and metrics of "
                f"{'it' if len(recording.silent) == 1 else 'them'} are missing in the recording"
            )
        self._silent = recording.silent

    def save_trace(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write everything that :meth:`trace` would have now, with cells, metrics and lost ranks, for a trace viewer.

        Args:
            path: A name that ends in ``.json`` (Chrome's format) or ``.json.gz`` (the same compressed).
            format: ``json`` or ``json.gz``; by default the name's ending decides.

        Returns:
            The file's whole path.

        Raises:
            InvalidRequestError: There is no such format.
            OSError: It could not be written; a file that was there stays as it was.
        """
        saved = save_trace(self.client, path, format)
        self._note_silent(self.client.recording)
        return saved

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
                # Ctrl-C here would leave the ranks that take long to end, and nothing would end them later.
                end_uninterrupted(self._parts.close)
                self._detach.detach()

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
        self._runs.drop_delayed_interrupts()  # before the lock, which may take longer than an interrupt is delayed
        with self._changing:
            if self._stopped:
                return
            self._stopped = True
            try:
                self.stop_timeline()
            finally:
                end_uninterrupted(self._detach)

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
        if broken := self._parts.broken:
            raise StartError(f"the pool has broken down: {broken}; stop it and start a new one.")


def _of_last_death(story: Sequence[Decision]) -> tuple[Decision, ...]:
    """Return the entries about the last process that died under a rank's number, without those about the ones before."""
    deaths = [entry for entry in story if entry.kind == "died"]
    if not deaths:
        return tuple(story)
    death = next(entry for entry in deaths if entry.facts.get("pid") == deaths[-1].facts.get("pid"))
    return tuple(entry for entry in story if entry.number >= (death.cause or death.number))


def _say_nothing(text: str) -> None:
    """Report no progress, for a caller that gave no callback."""

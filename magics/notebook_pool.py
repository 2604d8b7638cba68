"""The one pool of a notebook: find it, start it (also in the background), show how far its start is, and undo all that at unload.

Loading the extension imports this module, so it imports nothing that only a running pool needs.
"""

from __future__ import annotations

import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import compact_ranks, format_ranks, visible, visible_lines
from hvdlab.kernel_ext.kernel.pool_defaults import PoolDefaults
from hvdlab.kernel_ext.notebook.output_channels import RunningCellChannel, in_notebook

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording
    from hvdlab.kernel_ext.notebook.cells.sink import Sinks
    from hvdlab.kernel_ext.notebook.comm_relay import WidgetStates
    from hvdlab.kernel_ext.notebook.debugger.hub import DebugHub
    from hvdlab.kernel_ext.notebook.kept_pools import OrphanedCell
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.kernel_ext.notebook.prestart import Prestart
    from hvdlab.kernel_ext.wire.status import Completions, Inspection
    from hvdlab.magics.cell_strip import Strips
    from hvdlab.magics.screens import DisplayIds


class NotebookPool:
    """Pool of one shell, of which there is at most one, and the state that magics share.

    Args:
        shell: The shell.

    Attributes:
        pool: The pool, or None if there is none or it was stopped.
        prestart: Processes that were started before the first pool, which the next pool adopts.
        raw_cell: The notebook's cell that runs now, with its magic line.
        store_history: Whether ``raw_cell`` is one of the notebook's history.
        labels: Id to label of cells in the background.
        debugger: Hub between the frontend's debugger and the ranks; None if the kernel has no debugger.
        ranks_by_default: Whether plain cells run on the ranks.
        running_label: The label of the cell that ran last on the ranks.
        watchers: Callbacks for another pool, or none. Any thread.
        leaving: Callbacks of the extension's unloading.
        defaults: Returns the defaults of new pools, which options override.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.prestart: BackgroundPrestart | None = None
        self.raw_cell = ""
        self.store_history = True
        self.ranks_by_default = False
        self.running_label = ""
        self.labels: dict[str, str] = {}
        self.debugger: DebugHub | None = None
        self.watchers: list[Callable[[], None]] = []
        self.leaving = ExitStack()
        self.defaults: Callable[[], PoolDefaults] = PoolDefaults
        self._pool: Pool | None = None
        #: Recording of the next pool, if views wait for it already.
        self._next_recording: Recording | None = None
        self._start_under_way: BackgroundStart | None = None
        self._broken = ""  # why the last pool can't be used any more

    @cached_property
    def strips(self) -> Strips:
        """Return the live strips under cells."""
        from hvdlab.magics.cell_strip import Strips

        return Strips()

    @cached_property
    def areas(self) -> DisplayIds:
        """Return the display areas of the ranks' display ids."""
        from hvdlab.magics.screens import DisplayIds

        return DisplayIds()

    @cached_property
    def _widgets(self) -> WidgetStates:
        from hvdlab.kernel_ext.notebook.comm_relay import WidgetStates

        return WidgetStates()

    @property
    def pool_unchecked(self) -> Pool | None:
        """Return the pool without a check whether it still works. Any thread."""
        return self._pool

    def set_pool(self, pool: Pool | None) -> None:
        """Make this the notebook's pool, or have none. Any thread."""
        self._pool = pool
        self._widgets.clear()
        self.areas.clear()
        awaited = self._next_recording
        if pool is not None and awaited is not None:
            self._next_recording = None
            pool.client.adopt(awaited)
        if pool is not None and in_notebook(self.shell):
            from hvdlab.kernel_ext.notebook.comm_relay import CommRelay

            CommRelay(pool.client, self.shell, self._widgets)
        # A copy: the panel may end on the main thread while the thread of a start is here.
        for watcher in tuple(self.watchers):
            watcher()

    def next_recording(self) -> Recording:
        """Return the recording of the next pool; empty until there is one."""
        from hvdlab.collectives.tracing.recording import Recording

        if self._next_recording is None:
            self._next_recording = Recording()
        return self._next_recording

    @property
    def pool(self) -> Pool | None:
        pool = self._pool
        if pool is not None and (broken := pool.broken):
            self._broken = broken
            pool.stop()
        if pool is not None and pool.state == "stopped":
            self.set_pool(None)
        return self._pool

    def need_pool(self, what: str) -> Pool:
        """Return the pool.

        Args:
            what: The magic that needs it, for the message.

        Raises:
            UsageError: There is no pool, or this process is a rank.
        """
        from hvdlab.kernel_ext.notebook.assembly import check_sees_ranks

        with as_usage_error():
            check_sees_ranks(what)
        self._await_start()
        if self.pool is None:
            if self._broken:
                raise UsageError(self._gone())
            raise UsageError(
                f"{what}: no ranks are running; start some with `%hvd_pool start -np 8` or a %%hvd_run cell"
            )
        return self.pool

    def pool_for(
        self,
        np: int | None,
        *,
        launcher: str | None = None,
        plane: str | None = None,
        hosts: str | None = None,
        keep: str | None = None,
        launcher_options: Sequence[str] | None = None,
        new: bool = False,
        sync: bool = False,
        say: Callable[[str], None] = print,
    ) -> Pool:
        """Return a pool with ``np`` ranks: the present one, resized if need be, or a new one.

        Args:
            np: Number of ranks; None for the present one, or the default of a new pool.
            launcher: Name of the launcher of a new pool.
            plane: Name of the data plane of a new pool.
            hosts: Hosts of a new pool, with how many ranks on each: ``a:4,b:4``.
            keep: A name, or an empty text, for a new pool that outlives the notebook.
            launcher_options: ``key=value`` for a new pool; a pool that runs keeps those that it was started with.
            new: Start a pool also if the last one broke down, which otherwise needs ``np``: a cell that relies on variables
                of the old ranks would only fail on new ones.
            sync: Bring the variables of the other ranks to ranks that came later.
            say: Called with each sentence for the user.

        Raises:
            UsageError: No such pool can be made; the text has the remedy.
        """
        self._await_start()
        pool = self.pool
        if pool is None:
            from hvdlab.kernel_ext.notebook.assembly import check_not_in_rank

            with as_usage_error():
                check_not_in_rank()  # first, before other checks and before anything is started
            if self._broken and np is None and not new:
                raise UsageError(self._gone())
            return self._start(np, launcher, plane, hosts, keep, launcher_options or (), say)
        if keep is not None and not pool.name:
            raise UsageError(
                "--keep: the ranks that run were started without it and end with this notebook; `%hvd_pool stop` ends "
                "them, then a new pool can be started"
            )
        for option, wanted, has in (("--launcher", launcher, pool.launcher), ("--plane", plane, pool.plane)):
            if wanted is not None and wanted != has:
                raise UsageError(
                    f"{option} {wanted}: the ranks that run were started with {has}; `%hvd_pool stop` ends them, "
                    "then a new pool can be started"
                )
        if launcher_options:
            raise UsageError(
                "--launcher-option: the ranks that run were started already; `%hvd_pool stop` ends them, then a new pool can "
                "be started"
            )
        resized = np is not None and np != pool.size
        if np is not None and resized:
            for line in self.resize(pool, np):
                say(line)
        if (resized or sync) and (greeting := self.unsynced_notice(pool, bring=sync)):
            say(greeting)
        for text in pool.news():
            say(visible_lines(text))
        if pool.lost:
            say(f"{_lost(pool.lost)}; `%hvd_pool repair` starts lost ranks again")
        return pool

    def resize(self, pool: Pool, np: int) -> list[str]:
        """Change the number of ranks, and return a sentence for the user if ranks that lived have ended."""
        before = set(pool.ranks)
        with as_usage_error():
            pool.resize(np)
        ended = sorted(before - set(pool.ranks))
        if not ended:
            return []
        has, its = ("has", "its") if len(ended) == 1 else ("have", "their")
        return [f"{format_ranks(ended)} {has} ended, with {its} variables"]

    def unsynced_notice(self, pool: Pool, *, bring: bool = False) -> str:
        """Return the sentence about ranks that came later and lack variables; empty if none does.

        With ``bring``, and in the kernel whose cells run on ranks, bring them these variables. Not while a cell runs: that
        would come after the cell, and the notebook would wait for it.
        """
        from hvdlab.kernel_ext.notebook.elastic import missing_names_notice

        if not (new := pool.newcomers):
            return ""
        names = pool.names()
        lacks = missing_names_notice(names, new)
        if not (bring or self.ranks_by_default) or pool.state == "running":
            return f"{format_ranks(new)} {'is' if len(new) == 1 else 'are'} new; {lacks}" if lacks else ""
        # Ranks that were too slow to answer may have variables all the same.
        if not lacks and names.keys() | {*new} >= {*pool.ranks}:
            return ""
        try:
            return str(pool.sync())
        except HvdlabError as error:
            return f"{error}; `%hvd_pool sync` tries again"

    def check_answering(self, pool: Pool, ranks: Sequence[int]) -> None:
        """Raise UsageError if one of these ranks was given up and still hangs: a cell would wait for it for ever."""
        hanging = {rank: label for rank, label in pool.hanging.items() if rank in ranks}
        if not hanging:
            return
        late = sorted(hanging)
        labels = {label for label in hanging.values() if label}
        cell = f"cell {labels.pop()}" if len(labels) == 1 else "a cell"
        hang, them = ("hangs", "it") if len(late) == 1 else ("hang", "them")
        others = [rank for rank in ranks_of(pool) if rank not in hanging]
        leave_out = f", `--ranks {compact_ranks(others)}` leaves {them} out" if others else ""
        replace = f"`%hvd_pool restart {compact_ranks(late)}` replaces {them}"
        if not pool.replaceable:
            replace = "`%hvd_pool stop` ends the pool"
        raise UsageError(
            f"{format_ranks(late)} still {hang} in {cell}, which was given up; {replace}{leave_out}"
        )

    def _gone(self) -> str:
        return f"the ranks are gone, and their variables with them: {self._broken}; `%hvd_pool start -np 8` starts new ones"

    def close(self) -> None:
        """Stop the pool, if there is one, and processes that were started for the next one."""
        if "strips" in vars(self):  # otherwise no cell has had one
            self.strips.close()
        self.leaving.close()
        if self._next_recording is not None:
            self._next_recording.close()
        self.end_pool()
        prestart, self.prestart = self.prestart, None
        if prestart is not None:
            prestart.close()

    def end_pool(self) -> None:
        """Stop the pool, or detach from it if it is kept; the same for a pool that is being started. Any thread."""
        start, self._start_under_way = self._start_under_way, None
        if start is not None:
            start.close()
        # After the start is closed: until then its thread can still set a pool.
        pool, self._pool = self._pool, None
        if pool is not None and pool.state != "stopped":
            if pool.name:
                pool.detach()
            else:
                pool.stop()

    def ranks_that_have(self, name: str) -> tuple[int, ...]:
        """Return the ranks on which users have made this name, of those that answer within the pool's limit; none without a pool."""
        pool = self.pool
        if pool is None:
            return ()
        try:
            names = pool.names()
        except HvdlabError:  # the pool is gone or has no rank that lives: the user's own error stands
            return ()
        return tuple(
            rank for rank, found in sorted(names.items()) if name in (*found.variables, *found.modules)
        )

    def release_kept(self) -> None:
        """Detach from a pool that is kept, whose ranks and cells go on; other pools stay. Any thread, also while a cell runs."""
        pool = self._pool
        if pool is not None and pool.name:
            self.end_pool()

    def attach(self, name: str, show: Callable[[OrphanedCell], Sinks], launcher: str | None = None) -> Pool:
        """Attach to a kept pool, and return it.

        Args:
            name: The pool's name.
            show: Returns the sink for a cell that the notebook before has left.
            launcher: The pool's launcher, if the user named it.

        Raises:
            UsageError: That has failed, or this notebook has a pool.
        """
        self._await_start()
        if self.pool is not None:
            raise UsageError(
                "this notebook has ranks already; `%hvd_pool stop` ends them, then others can be attached to"
            )
        prestart, self.prestart = self.prestart, None
        if prestart is not None:
            prestart.close()
        with as_usage_error():
            pool = self._attach_pool(name, show=show, launcher=launcher)
        self._broken = ""
        self.set_pool(pool)
        return pool

    # -- starting -----------------------------------------------------------------------------------------------------

    def start_in_background(self, defaults: Callable[[], PoolDefaults]) -> None:
        """Begin to start a pool in the background. If that fails, the first use of the pool raises the error.

        Args:
            defaults: Returns the defaults of this pool and of later ones, which options override; called on another thread.
        """
        self.defaults = defaults
        prestart, self.prestart = self.prestart, None
        self._start_under_way = BackgroundStart(self, prestart)

    def start_pool(self, **arguments: Any) -> Pool:
        """Start a pool, with the arguments of ``Pool.start``. Any thread."""
        from hvdlab.kernel_ext.notebook.pool import Pool

        return Pool.start(**arguments)

    def _attach_pool(self, name: str, *, show: Callable[[OrphanedCell], Sinks], launcher: str | None) -> Pool:
        from hvdlab.kernel_ext.notebook.pool import Pool

        return Pool.attach(name, show=show, launcher=launcher)

    def _await_start(self) -> None:
        start = self._start_under_way
        if start is None:
            return
        try:
            with as_usage_error(), StartProgress(self.shell, alone=self._alone()) as progress:
                start.wait(progress)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the ranks go on starting") from None
        except BaseException:
            # The error is raised once: the next cell begins another start.
            self._start_under_way = None
            raise
        self._start_under_way = None

    def _alone(self) -> bool:
        """Return whether the cell that runs will show nothing but the output of its ranks."""
        cell = self.raw_cell.lstrip()
        return cell.startswith("%%hvd_run") or (self.ranks_by_default and not cell.startswith("%"))

    def _start(
        self,
        np: int | None,
        launcher: str | None,
        plane: str | None,
        hosts: str | None,
        keep: str | None,
        launcher_options: Sequence[str],
        say: Callable[[str], None],
    ) -> Pool:
        with as_usage_error():
            defaults = self.defaults()
        chosen = any(one is not None for one in (np, hosts, defaults.np, defaults.hosts))
        arguments = _arguments(defaults, np, launcher, plane, hosts)
        if launcher_options:
            from hvdlab.launch.options import split as split_options

            with as_usage_error():
                arguments["launcher_options"] = split_options(launcher_options)
        prestart, self.prestart = self.prestart, None
        warm = prestart.hand_over() if prestart is not None else None
        try:
            with as_usage_error(), StartProgress(self.shell, alone=self._alone()) as progress:
                pool = self.start_pool(**arguments, warm=warm, keep=keep, on_progress=progress)
        except KeyboardInterrupt:
            raise Interrupted("interrupted before all ranks were ready; none was kept") from None
        self._broken = ""
        self.set_pool(pool)
        if not chosen:
            say(f"started {arguments['np']} ranks (-np chooses how many)")
        return pool


def _arguments(
    defaults: PoolDefaults, np: int | None, launcher: str | None, plane: str | None, hosts: str | None
) -> dict[str, Any]:
    """Return the arguments of ``Pool.start``: from the options, then from the notebook's defaults, then from the pool's."""
    from hvdlab.kernel_ext.notebook.assembly import default_size

    hosts = hosts or defaults.hosts
    np = np if np is not None else defaults.np
    return {
        "np": default_size() if np is None and hosts is None else np,
        "launcher": launcher or defaults.launcher or "local",
        "plane": plane or defaults.plane or "auto",
        "hosts": hosts,
    }


def _lost(lost: Mapping[int, str]) -> str:
    reasons = set(lost.values())
    are = "is" if len(lost) == 1 else "are"
    more = "" if len(reasons) == 1 else " and other reasons"
    return f"{format_ranks(list(lost))} {are} lost ({next(iter(lost.values()))}{more})"


class Interrupted(KeyboardInterrupt):
    """Interrupt by the user while the pool was busy; shown in one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Turn an error of the pool into one sentence, without a traceback through our own frames."""
    try:
        yield
    except (HvdlabError, TimeoutError, OSError) as error:
        raise UsageError(visible_lines(str(error))) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hvdlab"):
            raise
        raise UsageError(f"{error}; `pip install {error.name}` adds it") from None


def cell_number(shell: InteractiveShell) -> int:
    """Return the number of the cell that runs now, as in ``In[7]``; releases of IPython count on at different moments."""
    return int(getattr(shell.displayhook, "prompt_count", shell.execution_count))


def shell_colours(shell: InteractiveShell) -> bool:
    """Return whether the shell shows tracebacks in colour."""
    return str(shell.colors).lower() != "nocolor"


def ranks_of(pool: Pool) -> list[int]:
    """Return the ranks that live, ascending."""
    return sorted(pool.ranks)


LEAVE_WITHIN = 5.0
"""Seconds that :meth:`BackgroundStart.close` waits for a start that is under way. The start ends with this process in any case."""


class BackgroundStart:
    """Start of a pool on a thread of its own.

    Args:
        session: Starts the pool with its defaults, and gets it on that thread.
        prestart: Processes that the pool adopts; None if there are none.
    """

    def __init__(self, session: NotebookPool, prestart: BackgroundPrestart | None) -> None:
        self._session, self._prestart = session, prestart
        # Now: a later start has defaults of its own.
        self._defaults = session.defaults
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlab-start", daemon=True)
        self._thread.start()

    def wait(self, show: Callable[[str], None]) -> None:
        """Wait until the pool is there, and raise the error of its start. An interrupt ends the wait, not the start.

        Args:
            show: Called with a short text at each step.
        """
        for text in iter(self._steps.get, None):
            show(text)
        self._steps.put(None)  # for the next call
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Abandon the start: the pool ends as soon as it has started."""
        with self._lock:
            self._closed = True
        # Without the lock, which the thread needs when its pool is there.
        self._thread.join(LEAVE_WITHIN)

    def _run(self) -> None:
        try:
            pool = self._start()
            # Under the lock: otherwise `close` could come between the check and the call, and the pool would outlive it.
            with self._lock:
                closed = self._closed
                if not closed:
                    self._session.set_pool(pool)
            if closed:
                pool.stop()
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            self._error = error
        finally:
            self._steps.put(None)

    def _start(self) -> Pool:
        warm = self._prestart.hand_over() if self._prestart is not None else None
        try:
            arguments = _arguments(self._defaults(), None, None, None, None)
        except BaseException:
            if warm is not None:
                warm.close()
            raise
        return self._session.start_pool(**arguments, warm=warm, keep=None, on_progress=self._steps.put)


class BackgroundPrestart:
    """Processes of the first pool, started on a thread while the user is still typing, so that ``%load_ext`` returns at once.

    Args:
        preload: Modules that the first cell needs, imported on that thread afterwards.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._warm: Prestart | None = None
        self._thread = threading.Thread(target=self._begin, name="hvdlab-prestart", daemon=True)
        self._thread.start()

    def hand_over(self) -> Prestart | None:
        """Return the processes, once; None if they could not be started (``Pool.start`` then finds out why)."""
        self._thread.join()
        warm, self._warm = self._warm, None
        return warm

    def close(self) -> None:
        """End the processes, unless they were handed over."""
        warm = self.hand_over()
        if warm is not None:
            warm.close()

    def _begin(self) -> None:
        from hvdlab.collectives import context  # imports the engine, and so numpy

        if context.in_rank_of_pool():  # a rank starts no pool
            return
        from hvdlab.kernel_ext.notebook.prestart import Prestart

        try:
            self._warm = Prestart.begin()
        except (HvdlabError, OSError):
            self._warm = None
        for module in self._preload:
            import_module(module)


_ERASE = "\r\x1b[K"


class StartProgress:
    """Line about the start of ranks that is rewritten at each step, and gone at the end.

    Args:
        shell: The shell.
        alone: Whether the cell shows only this, so that its output may be cleared.
    """

    def __init__(self, shell: InteractiveShell, *, alone: bool) -> None:
        self._shell = shell
        self._notebook = in_notebook(shell) and alone
        self._tty = not in_notebook(shell) and sys.stderr.isatty()
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear()

    def __call__(self, text: str) -> None:
        """Show the next step."""
        if self._notebook or self._tty:
            self._clear()
            self._shown = True
            # Notebooks show stderr in red, as if something had gone wrong; in a terminal stdout is for results.
            stream = sys.stdout if self._notebook else sys.stderr
            stream.write(f"{visible(text)} ..." + ("\n" if self._notebook else ""))
            stream.flush()

    def _clear(self) -> None:
        if not self._shown:
            return
        self._shown = False
        if self._notebook:
            self._shell.display_pub.clear_output(wait=False)
        else:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


class CellImportDisplay:
    """Line of the running cell that names a package while a module of it is imported, and is gone afterwards.

    It has no state, and does not keep results from being pickled.
    """

    @contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """Show that this module's package is imported until the context is left, unless it was imported before."""
        package = module.partition(".")[0]
        shell = None if package in sys.modules else get_ipython()
        text = f"importing {visible(package)} …"
        if shell is not None and in_notebook(shell):
            publisher, area = RunningCellChannel(shell), f"hvdlab-import-{uuid.uuid4().hex}"
            publisher.display({"text/plain": text}, {}, area)
            try:
                yield
            finally:
                publisher.display({"text/plain": "", "text/html": ""}, {}, area, update=True)
        elif shell is not None and sys.stderr.isatty():
            sys.stderr.write(text)
            sys.stderr.flush()
            try:
                yield
            finally:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()
        else:
            yield


A = TypeVar("A")

ANSWER_IDLE = 5.0
"""Seconds that an idle rank has to answer; its first completion imports jedi."""

ANSWER_BUSY = 2.0
"""Seconds that a rank which runs a cell has; it answers at once, unless other code holds its interpreter."""


class SessionBackend:
    """Backend of the kernel whose cells run on all ranks: the notebook's pool."""

    def __init__(self, session: NotebookPool) -> None:
        self._session = session
        session.ranks_by_default = True

    def begin(self, defaults: Callable[[], PoolDefaults]) -> None:
        """Begin to start ranks."""
        self._session.start_in_background(defaults)

    def cell(self, code: str, *, store_history: bool) -> None:
        """Remember the cell that the kernel is going to run."""
        self._session.raw_cell = code
        self._session.store_history = store_history

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Return completions from the first rank."""
        return self._ask(lambda pool: pool.complete(code, cursor, timeout=_answer_within(pool)))

    def inspect(self, code: str, cursor: int, detail: int) -> Inspection | None:
        """Return documentation from the first rank."""
        return self._ask(lambda pool: pool.inspect(code, cursor, detail, timeout=_answer_within(pool)))

    def evaluate(self, expressions: Mapping[str, str]) -> dict[str, Any]:
        """Return values of a client's expressions, evaluated on the first rank."""
        found = self._ask(lambda pool: pool.express(expressions))
        if found is not None:
            return dict(found)
        why = {"ename": "NoAnswer", "evalue": "the first rank does not answer", "traceback": []}
        return {name: {"status": "error", **why} for name in expressions}

    def busy_with(self) -> str:
        """Return the label of the cell that runs; empty if none does."""
        pool = self._session.pool_unchecked
        return self._session.running_label if pool is not None and pool.state == "running" else ""

    def end(self) -> None:
        """End the ranks with the kernel, or detach from them if they are kept."""
        self._session.end_pool()

    def _ask(self, ask: Callable[[Pool], A | None]) -> A | None:
        pool = self._session.pool_unchecked
        if pool is None or pool.state not in ("idle", "running"):
            return None
        try:
            return ask(pool)
        except HvdlabError:  # the pool broke down, or has no ranks; the next cell says so
            return None


def _answer_within(pool: Pool) -> float:
    return ANSWER_BUSY if pool.state == "running" else ANSWER_IDLE

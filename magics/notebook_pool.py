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
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.errors import HvdlabError, compact_ranks, format_ranks
from hvdlab.collectives.text import visible, visible_lines
from hvdlab.kernel_ext.notebook.comm_relay import WidgetStates
from hvdlab.kernel_ext.spmd.wishes import PoolDefaults
from hvdlab.launch.options import split as split_options
from hvdlab.magics.screens.cell_strip import Strips
from hvdlab.magics.screens.notebook import DisplayIds
from hvdlab.magics.screens.publishers import FixedCellChannel, RunningCellChannel, in_notebook

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording
    from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
    from hvdlab.kernel_ext.notebook.debugger.hub import DebugHub
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.kernel_ext.notebook.prestart import Prestart
    from hvdlab.kernel_ext.notebook.takeover import OrphanedCell
    from hvdlab.kernel_ext.wire.status import Completions, Inspection


class NotebookPool:
    """The pool of one shell.

    Args:
        shell: The shell.
        start: Starts a pool; by default ``Pool.start``.
        attach: Takes a kept pool over by its name; by default ``Pool.attach``.

    Attributes:
        pool: The pool, or None if there is none or it was stopped.
        ahead: What was started ahead; the next pool takes it.
        raw_cell: The notebook's cell that runs now, with its magic line.
        store_history: Whether ``raw_cell`` is one of the notebook's history.
        labels: Id to label of cells in the background.
        strips: The live strips under cells.
        areas: Where the displays of ranks are that have an id.
        debugger: What lets the frontend's debugger reach the ranks.
        ranks_by_default: Whether plain cells run on the ranks.
        running_label: The label of the cell that ran last on the ranks.
        watchers: Called whenever there is another pool, or none. Any thread.
        leaving: What is closed when the extension is unloaded.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        start: Callable[..., Pool] | None = None,
        attach: Callable[..., Pool] | None = None,
    ) -> None:
        self.shell = shell
        self.prestart: BackgroundPrestart | None = None
        self.raw_cell = ""
        self.store_history = True
        self.ranks_by_default = False
        self.running_label = ""
        self.labels: dict[str, str] = {}
        self.strips = Strips()
        self.areas = DisplayIds()
        self.debugger: DebugHub | None = None
        self.watchers: list[Callable[[], None]] = []
        self.leaving = ExitStack()
        self._widgets = WidgetStates()
        self._pool: Pool | None = None
        #: The recording of the next pool, if views wait for it already.
        self._next_recording: Recording | None = None
        self._start_under_way: BackgroundStart | None = None
        self._defaults: Callable[[], PoolDefaults] = PoolDefaults
        self._broken = ""  # why the last pool can't be used any more
        self._start_pool = start or _start_pool
        self._attach_pool = attach or _attach_pool

    @property
    def pool_unchecked(self) -> Pool | None:
        """The pool, without a check whether it still works. Any thread."""
        return self._pool

    def _set(self, pool: Pool | None) -> None:
        self._pool = pool
        self._widgets.clear()
        self.areas.clear()
        awaited = self._next_recording
        if pool is not None and awaited is not None:
            self._next_recording = None
            pool.client.adopt(awaited)
        if pool is not None and in_notebook(self.shell):
            from hvdlab.kernel_ext.notebook.comm_relay import CommRelay

            CommRelay(pool.client, lambda: FixedCellChannel(self.shell).stream, self._widgets)
        for watcher in tuple(self.watchers):
            watcher()

    def next_recording(self) -> Recording:
        """The recording of the next pool; empty until there is one."""
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
            self._set(None)
        return self._pool

    def need_pool(self, what: str) -> Pool:
        """Return the pool; raises UsageError, which names ``what``, if there is none, or this is a rank."""
        from hvdlab.kernel_ext.notebook.checks import check_sees_ranks

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
        """The pool with ``np`` ranks: as it is, resized or new.

        Args:
            keep: A name, or an empty text, for a new pool that shall outlive the notebook.
            launcher_options: ``key=value`` for a new pool; a pool that runs keeps those that it was started with.
            new: Start a pool also if the last one broke down, which else only happens if ``np`` is given: a cell that
                relies on variables of the old ranks would only fail on new ones.
            sync: Bring ranks that came later what the others know.
            say: Called with each sentence for the user.

        Raises:
            UsageError: There can't be such a pool; the text has the remedy.
        """
        self._await_start()
        pool = self.pool
        if pool is None:
            from hvdlab.kernel_ext.notebook.checks import check_not_in_rank

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
        """Change the number of ranks. Returns a sentence for the user if ranks that lived have ended."""
        before = set(pool.ranks)
        with as_usage_error():
            pool.resize(np)
        ended = sorted(before - set(pool.ranks))
        if not ended:
            return []
        has, its = ("has", "its") if len(ended) == 1 else ("have", "their")
        return [f"{format_ranks(ended)} {has} ended, with {its} variables"]

    def unsynced_notice(self, pool: Pool, *, bring: bool = False) -> str:
        """The sentence about ranks that came later. With ``bring``, and in the kernel whose cells run on ranks, bring them what others know.

        That is not done while a cell runs: it would come after the cell, and the notebook would wait for it.
        """
        from hvdlab.kernel_ext.notebook.unsynced import missing_names_notice

        new = pool.newcomers
        lacks = missing_names_notice(pool.names(), new) if new else ""
        if not lacks:
            return ""
        if not (bring or self.ranks_by_default) or pool.state == "running":
            return f"{format_ranks(new)} {'is' if len(new) == 1 else 'are'} new; {lacks}"
        try:
            return str(pool.sync())
        except HvdlabError as error:
            return f"{error}; `%hvd_pool sync` tries again"

    def check_answering(self, pool: Pool, ranks: Sequence[int]) -> None:
        """Raises UsageError if one of these ranks was given up and still hangs: a cell would wait for it for ever."""
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
        """Stop the pool, if there is one, and what was started ahead."""
        self.strips.close()
        self.leaving.close()
        if self._next_recording is not None:
            self._next_recording.close()
        self.end_pool()
        ahead, self.prestart = self.prestart, None
        if ahead is not None:
            ahead.close()

    def end_pool(self) -> None:
        """Stop the pool, or leave it if it is kept; the same for a pool that is being started. Any thread."""
        coming, self._start_under_way = self._start_under_way, None
        if coming is not None:
            coming.close()
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
        """Let go of a pool that is kept, whose ranks and cells go on; other pools stay. Any thread, also while a cell runs."""
        pool = self._pool
        if pool is not None and pool.name:
            self.end_pool()

    def attach(
        self, name: str, show: Callable[[OrphanedCell], OutputSink], launcher: str | None = None
    ) -> Pool:
        """Take a kept pool over. Raises UsageError if that fails, or this notebook has a pool.

        Args:
            name: The pool's name.
            show: Returns the sink for a cell that the notebook before has left.
            launcher: The pool's launcher, if the user named it.
        """
        self._await_start()
        if self.pool is not None:
            raise UsageError(
                "this notebook has ranks already; `%hvd_pool stop` ends them, then others can be attached to"
            )
        ahead, self.prestart = self.prestart, None
        if ahead is not None:
            ahead.close()
        with as_usage_error():
            pool = self._attach_pool(name, show=show, launcher=launcher)
        self._broken = ""
        self._set(pool)
        return pool

    # -- starting -----------------------------------------------------------------------------------------------------

    def start_in_background(self, wishes: Callable[[], PoolDefaults]) -> None:
        """Begin to start a pool in the background. If that fails, the first use of the pool raises the error.

        Args:
            wishes: What the pool shall be like, and later ones unless options say otherwise; called on another thread.
        """
        self._defaults = wishes
        ahead, self.prestart = self.prestart, None

        def start(say: Callable[[str], None]) -> Pool:
            warm = ahead.hand_over() if ahead is not None else None
            try:
                arguments = _arguments(wishes(), None, None, None, None)
            except BaseException:
                if warm is not None:
                    warm.close()
                raise
            return self._start_pool(**arguments, warm=warm, keep=None, on_progress=say)

        self._start_under_way = BackgroundStart(start, self._pool_started)

    def _pool_started(self, coming: BackgroundStart, pool: Pool) -> None:
        self._set(pool)

    def _await_start(self) -> None:
        coming = self._start_under_way
        if coming is None:
            return
        try:
            with as_usage_error(), StartProgress(self.shell, alone=self._alone()) as progress:
                coming.wait(progress)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the ranks go on starting") from None
        except BaseException:
            self._start_under_way = None
            raise
        self._start_under_way = None

    def _alone(self) -> bool:
        """Whether the cell that runs will show nothing but what its ranks show."""
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
            wishes = self._defaults()
        chosen = any(one is not None for one in (np, hosts, wishes.np, wishes.hosts))
        arguments = _arguments(wishes, np, launcher, plane, hosts)
        if launcher_options:
            with as_usage_error():
                arguments["launcher_options"] = split_options(launcher_options)
        ahead, self.prestart = self.prestart, None
        warm = ahead.hand_over() if ahead is not None else None
        try:
            with as_usage_error(), StartProgress(self.shell, alone=self._alone()) as progress:
                pool = self._start_pool(**arguments, warm=warm, keep=keep, on_progress=progress)
        except KeyboardInterrupt:
            raise Interrupted("interrupted before all ranks were ready; none was kept") from None
        self._broken = ""
        self._set(pool)
        if not chosen:
            say(f"started {arguments['np']} ranks (-np chooses how many)")
        return pool


def _arguments(
    wishes: PoolDefaults, np: int | None, launcher: str | None, plane: str | None, hosts: str | None
) -> dict[str, Any]:
    """Arguments of ``Pool.start``: from the options, else from the wishes, else the defaults."""
    from hvdlab.kernel_ext.notebook.checks import default_size

    hosts = hosts or wishes.hosts
    np = np if np is not None else wishes.np
    return {
        "np": default_size() if np is None and hosts is None else np,
        "launcher": launcher or wishes.launcher or "local",
        "plane": plane or wishes.plane or "auto",
        "hosts": hosts,
    }


def _lost(lost: Mapping[int, str]) -> str:
    reasons = set(lost.values())
    are = "is" if len(lost) == 1 else "are"
    more = "" if len(reasons) == 1 else " and other reasons"
    return f"{format_ranks(list(lost))} {are} lost ({next(iter(lost.values()))}{more})"


def _attach_pool(name: str, **kwargs: Any) -> Pool:
    from hvdlab.kernel_ext.notebook.pool import Pool

    return Pool.attach(name, **kwargs)


def _start_pool(*args: Any, **kwargs: Any) -> Pool:
    from hvdlab.kernel_ext.notebook.pool import Pool

    return Pool.start(*args, **kwargs)


class Interrupted(KeyboardInterrupt):
    """The user interrupted what the pool was doing. Shown in one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Show what the pool can't do in one sentence, without a traceback through our own frames."""
    try:
        yield
    except (HvdlabError, TimeoutError, OSError) as error:
        raise UsageError(visible_lines(str(error))) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hvdlab"):
            raise
        raise UsageError(f"{error}; `pip install {error.name}` adds it") from None


def cell_number(shell: InteractiveShell) -> int:
    """The number of the cell that runs now, as in ``In[7]``; releases of IPython count on at different moments."""
    return int(getattr(shell.displayhook, "prompt_count", shell.execution_count))


def shell_colours(shell: InteractiveShell) -> bool:
    """Whether the shell shows tracebacks in colour."""
    return str(shell.colors).lower() != "nocolor"


def ranks_of(pool: Pool) -> list[int]:
    """The ranks that live, ascending."""
    return sorted(pool.ranks)


LEAVE_WITHIN = 5.0
"""Seconds that :meth:`BackgroundStart.close` waits for a start that is under way. The start ends with this process in any case."""


class BackgroundStart:
    """Starts a pool on a thread of its own.

    Args:
        start: Starts the pool; called with a function that it calls with a short text at each step.
        done: Called with the pool, on that thread.
    """

    def __init__(
        self, start: Callable[[Callable[[str], None]], Pool], done: Callable[[BackgroundStart, Pool], None]
    ) -> None:
        self._start, self._done = start, done
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlab-start", daemon=True)
        self._thread.start()

    def wait(self, show: Callable[[str], None]) -> None:
        """Wait until the pool is there, and raise what its start raised. An interrupt ends the wait, not the start.

        Args:
            show: Called with a short text at each step.
        """
        for text in iter(self._steps.get, None):
            show(text)
        self._steps.put(None)  # for the next call
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give the pool up: it ends as soon as it has started."""
        with self._lock:
            self._closed = True
        self._thread.join(LEAVE_WITHIN)

    def _run(self) -> None:
        try:
            pool = self._start(self._steps.put)
            with self._lock:
                wanted = not self._closed
                if wanted:
                    self._done(self, pool)
            if not wanted:
                pool.stop()
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            self._error = error
        finally:
            self._steps.put(None)


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
        """Hand the warm pool over, once; None if it could not be begun (``Pool.start`` then finds out why)."""
        self._thread.join()
        warm, self._warm = self._warm, None
        return warm

    def close(self) -> None:
        """End what was started, unless it was taken."""
        warm = self.hand_over()
        if warm is not None:
            warm.close()

    def _begin(self) -> None:
        from hvdlab.kernel_ext.notebook.prestart import Prestart

        try:
            self._warm = Prestart.begin()
        except (HvdlabError, OSError):
            self._warm = None
        for module in self._preload:
            import_module(module)


_ERASE = "\r\x1b[K"


class StartProgress:
    """One line that is rewritten at each step and gone at the end.

    Args:
        shell: The shell.
        alone: Whether nothing else is shown in this cell, so that its output may be cleared.
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
            self._shell.display_pub.clear_output(wait=False)  # type: ignore[no-untyped-call]  # IPython has no annotation
        else:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


class CellImportDisplay:
    """One line of the running cell that names a package while a module of it is imported, and is gone afterwards.

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

PATIENCE = 5.0
"""Seconds that an idle rank has to answer; its first completion imports jedi."""

BUSY_PATIENCE = 2.0
"""Seconds that a rank which runs a cell has; it answers at once, unless other code holds its interpreter."""


class SessionBackend:
    """The ranks of that kernel: its session's pool."""

    def __init__(self, session: NotebookPool) -> None:
        self._session = session
        session.ranks_by_default = True

    def begin(self, wishes: Callable[[], PoolDefaults]) -> None:
        """Begin to start ranks."""
        self._session.start_in_background(wishes)

    def cell(self, code: str, *, store_history: bool) -> None:
        """The kernel is going to run this cell."""
        self._session.raw_cell = code
        self._session.store_history = store_history

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Completions from the first rank."""
        return self._ask(lambda pool: pool.complete(code, cursor, timeout=_patience(pool)))

    def inspect(self, code: str, cursor: int, detail: int) -> Inspection | None:
        """Documentation from the first rank."""
        return self._ask(lambda pool: pool.inspect(code, cursor, detail, timeout=_patience(pool)))

    def evaluate(self, expressions: Mapping[str, str]) -> dict[str, Any]:
        """Values of a client's expressions, evaluated on the first rank."""
        found = self._ask(lambda pool: pool.express(expressions))
        if found is not None:
            return dict(found)
        why = {"ename": "NoAnswer", "evalue": "the first rank does not answer", "traceback": []}
        return {name: {"status": "error", **why} for name in expressions}

    def busy_with(self) -> str:
        """The label of the cell that runs; empty if none does."""
        pool = self._session.pool_unchecked
        return self._session.running_label if pool is not None and pool.state == "running" else ""

    def end(self) -> None:
        """The kernel ends: end the ranks, or leave them if they are kept."""
        self._session.end_pool()

    def _ask(self, ask: Callable[[Pool], A | None]) -> A | None:
        pool = self._session.pool_unchecked
        if pool is None or pool.state not in ("idle", "running"):
            return None
        try:
            return ask(pool)
        except HvdlabError:  # the pool broke down, or has no ranks; the next cell says so
            return None


def _patience(pool: Pool) -> float:
    return BUSY_PATIENCE if pool.state == "running" else PATIENCE

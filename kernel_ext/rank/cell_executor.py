"""Runs a cell of the pool in a rank's InteractiveShell, as a notebook would."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from hvdlab.bindings import framework_hooks
from hvdlab.collectives.context import with_own_errors
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.settings import restore_world_size
from hvdlab.kernel_ext.rank import output
from hvdlab.kernel_ext.rank.cell_source import CellCompiler, cell_number, without_blank_head
from hvdlab.kernel_ext.rank.debugger import (
    DebugServer,
    cut_debugger,
    forget_failure,
    looks_back,
    stop_tracing,
)
from hvdlab.kernel_ext.rank.errors import (
    describe,
    held_interrupt,
    interrupt_behind_exit,
    one_line,
    remember,
)
from hvdlab.kernel_ext.rank.interrupts import InterruptDelivery
from hvdlab.kernel_ext.rank.output import OutputQueue
from hvdlab.kernel_ext.rank.pipes import CStdout
from hvdlab.kernel_ext.rank.shell_setup import RankDisplayHook, wire_bundle
from hvdlab.kernel_ext.rank.stdin import RankStdin
from hvdlab.kernel_ext.rank.values import DumpedValue, dump_result, short_repr
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, Display, RunCell

FOR_EVER = 1e9
"""Seconds, as good as no limit, that ranks of an elastic cell wait for each other: the cell's output says that they wait,
and the user can end it."""


@dataclass(slots=True)
class CellExecution:
    """One run of a cell."""

    request: RunCell
    started: float = field(default_factory=time.monotonic)
    #: The rank's own process: a child that the cell forks sees by it that it is no rank.
    pid: int = field(default_factory=os.getpid)
    #: The first error: later ones, of hooks for example, are mostly its consequences.
    error: BaseException | None = None
    when: int = 0
    #: Whether the cell's code had begun when it failed: a SyntaxError is the cell's own only before that.
    ran: bool = False
    #: Whether interrupts are for this cell: the gate counts it as one that will begin until then.
    begun: bool = False
    #: Whether the coordinator has the end: an error reports it early, and _finish() must not repeat it.
    ended: bool = False


class CellExecutor:
    """Runs cells one at a time, on the main thread, from a task of its loop.

    The engine learns that a cell has failed before its traceback is made, since other ranks may be waiting in a collective;
    the pool learns it last, after all of the cell's output.
    """

    def __init__(
        self,
        shell: Any,
        engine: Engine,
        capture: OutputQueue,
        gate: InterruptDelivery,
        compiler: CellCompiler,
        hook: RankDisplayHook,
        debug: DebugServer,
        prompting: RankStdin,
    ) -> None:
        self._shell = shell
        self._engine = engine
        self._capture = capture
        self._gate = gate
        self._compiler = compiler
        self._hook, self._debug, self._prompting = hook, debug, prompting
        self._c_stdout = CStdout()
        self._run: CellExecution | None = None
        self._inside = False  # whether the user's own code is running
        #: Frameworks' modes before the cell, such as whether gradients are recorded; an interrupt may leave one half switched.
        self._modes: dict[str, Any] = {}

    @property
    def preparing(self) -> bool:
        """Return whether a cell is being compiled: IPython's messages about that go into the cell's error instead."""
        return self._run is not None and not self._inside

    async def run(self, request: RunCell, enter: Callable[[], None] | None = None) -> None:
        """Run the cell and report its end. This returns normally, also if the cell fails or raises SystemExit.

        Args:
            enter: Called before the cell's code, as a part of the cell.
        """
        run = self._run = CellExecution(request)
        self._capture.begin_cell(request.cell)
        output.set_current_cell(request.cell)
        self._engine.begin_cell(request.cell, announced=request.announced)
        self._modes = framework_hooks.modes()
        # An earlier cell may have trained with Lightning, which removes WORLD_SIZE at the end. Accelerate
        # would then start as a single process.
        restore_world_size()
        self._gate.begin()
        run.begun = True
        self._hook.plain, self._hook.remembers = "", request.store_history
        # Before the cell's code: frames of the last failure may keep a model's activations alive, and this
        # cell may have no room beside them.
        if not looks_back(request.source):
            forget_failure(self._shell)
        self._prompting.cell_begins(request.cell)
        # Only while a cell runs: between cells requests of ipyparallel use this shell by IPython's own method.
        self._shell.run_code = self._run_code
        settings = self._engine.settings
        if request.at_least:  # too few ranks wait until there are enough or the user interrupts
            self._engine.settings = replace(settings, min_np=request.at_least, elastic_timeout=FOR_EVER)
        result = None
        try:
            if enter is not None:
                self._guarded(lambda: self._unless_interrupted(enter))
            result = await self._run_in_shell(request)
            # The cell has forked and this is the child, which would otherwise go on as a second rank.
            if os.getpid() != run.pid:
                end_child(None)
            self._debug.cell_ended()
            self._run_hooks(result)
        # A CancelledError passes on: by it RankAgent.close() ends the task that runs the cells.
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # a failing IPython extension must not end the rank
            self._failed(error)
        finally:
            # Again, since an exception may have skipped the call above.
            self._debug.cell_ended()
            stop_tracing()
            self._prompting.cell_ended()
            del self._shell.run_code
            self._engine.settings = settings
            if run.error is None and result is not None and result.error_before_exec is not None:
                self._failed(result.error_before_exec)
            self._finish(run, getattr(result, "result", None))
            if result is not None:
                # Else the result, its error and the frames of the error's traceback would keep each other alive.
                result.error_before_exec = result.error_in_exec = None
            self._run = None

    def abandon(self, error: Exception) -> None:
        """End a cell that :meth:`run` did not bring to its end, because of a fault of ours: the coordinator counts it as running."""
        run, self._run = self._run, None
        if run is not None:
            run.error = run.error or error
            self._end_for_others(run)
        if run is not None and not run.begun:
            self._gate.skip()  # or else an interrupt while the rank is idle would hit its next cell
        self._gate.end()

    async def _run_in_shell(self, request: RunCell) -> Any:
        source, blank = without_blank_head(request.source)
        lines = request.line_offset + blank
        name = self._compiler.expect(source, request.label, lines, request.file)
        self._debug.cell_begins(request.file, name)
        broken = None
        try:
            transformed = self._shell.transform_cell(source)
        except Exception:  # noqa: BLE001  # an input transformer of the user; IPython shows it as the cell's error
            transformed, broken = source, sys.exc_info()
        if request.store_history:
            self._number_like_notebook(request.label)
        return await self._shell.run_cell_async(
            source,
            store_history=request.store_history,
            transformed_cell=transformed,
            preprocessing_exc_tuple=broken,
        )

    def _number_like_notebook(self, label: str) -> None:
        """Let ``Out[7]`` and ``In[7]`` have the numbers of the notebook."""
        number = cell_number(label)
        history = self._shell.history_manager
        if number is None or history is None:
            return
        self._shell.execution_count = number
        # IPython appends the cell's source to these lists, and finds it there by the cell's number.
        for inputs in (history.input_hist_parsed, history.input_hist_raw):
            inputs.extend([""] * (number - len(inputs)))

    async def _run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run one statement of the cell; takes the place of the shell's own method. True if it failed."""
        shell, gate = self._shell, self._gate
        if self._inside:  # a cell run by the cell: errors there are shown, and are not this cell's
            return bool(await type(shell).run_code(shell, code_obj, result, async_=async_))
        # As in IPython's own method: user code that calls sys.excepthook gets IPython's traceback, and magics
        # find the former hook in the shell.
        hook, sys.excepthook = sys.excepthook, shell.excepthook
        shell.sys_excepthook = hook
        variables = shell.user_global_ns, shell.user_ns
        self._inside = True
        gate.guard(code_obj)
        try:
            # Nothing between this look and the code's first instruction lets a signal handler run.
            if gate.pending:
                gate.pending = False
                raise KeyboardInterrupt
            if async_:
                await gate.drive(eval(code_obj, *variables))
            else:
                exec(code_obj, *variables)  # noqa: S102  # running cells is what a rank is for
            if gate.held:  # the statement ended before the interrupt was requested again
                raise KeyboardInterrupt
        except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt end the cell, not the rank
            if self._run is not None and os.getpid() != self._run.pid:
                end_child(error)
            self._debug.cut(error)
            self._failed(error)
            if result is not None:
                result.error_in_exec = error
            return True
        finally:
            # First: from here on an interrupt is kept for the next statement instead of being raised in this block.
            gate.unguard()
            self._inside = False
            sys.excepthook = hook
        return False

    def _failed(self, error: BaseException) -> None:
        run = self._run
        assert run is not None
        if self._gate.interrupted:
            framework_hooks.restore_modes(error, self._modes)
            error = interrupt_behind_exit(error)
        if self._gate.held:
            error = held_interrupt(error)
        if run.error is None:
            error = with_own_errors(cut_debugger(error))
            run.error, run.when, run.ran = error, time.monotonic_ns(), self._inside
            self._end_for_others(run)

    def _end_for_others(self, run: CellExecution, *, more: bool = False) -> None:
        """Report the end to the coordinator, unless that was done; with ``more``, mail follows at once and takes it along."""
        if not run.ended:
            run.ended = True
            error = None if run.error is None or _is_good_exit(run.error) else one_line(run.error)
            self._engine.end_cell(run.request.cell, error, more=more)

    def _run_hooks(self, result: Any) -> None:
        """Run IPython's hooks after a cell, which for example draw the figures that it made."""
        # The cell counts as running: IPython itself shows errors of hooks, such as a figure that can't be drawn.
        # They are printed then, and not mistaken for errors of the compiler.
        self._inside = True
        try:
            self._guarded(lambda: self._trigger(result))
        finally:
            self._inside = False

    def _trigger(self, result: Any) -> None:
        self._shell.events.trigger("post_execute")
        self._shell.events.trigger("post_run_cell", result)
        self._show_pages()

    def _show_pages(self) -> None:
        """Show the pages for which ``len?`` and ``%psource`` open a pager; drop other payloads, which a frontend would act on."""
        manager = self._shell.payload_manager
        payloads = manager.read_payload()
        for payload in payloads:
            if payload.get("source") == "page":
                self._capture.put(Display(wire_bundle(payload["data"]), {}))
        if payloads:
            manager.clear_payload()

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Call ``work``, which an interrupt may end with KeyboardInterrupt."""
        self._gate.guard(work.__code__)
        try:
            return work()
        finally:
            self._gate.unguard()

    def _unless_interrupted(self, work: Callable[[], None]) -> None:
        """Call ``work``, which waits for other ranks; if an interrupt came before it could be raised, raise it instead."""
        if self._gate.pending:
            self._gate.pending = False
            raise KeyboardInterrupt
        work()

    def _finish(self, run: CellExecution, value: Any) -> None:
        """Report the end: to the other ranks, then the last output, then to the pool."""
        # Ranks that wait in a collective for this one must not wait until a value is pickled, or the pool has room for output.
        # The report of the end shares a packet with CellDone only if nothing delays that message. An error has a
        # traceback to make, a value is pickled, and output may wait for room.
        self._end_for_others(run, more=value is None and run.error is None and self._capture.is_empty)
        self._c_stdout.flush()
        dumped, error = DumpedValue(None), None
        if run.error is not None:
            self._gate.end()
            remember(run.error)
            error = self._describe(run)
            value = None
        elif value is not None and run.request.want_value:
            limit = run.request.value_limit
            try:
                # Pickling runs the user's code, which may take for ever: an interrupt has to be able to end it.
                dumped = self._guarded(lambda: dump_result(value, limit))
            except KeyboardInterrupt:
                dumped = DumpedValue(None, "interrupted while it was pickled")
        self._gate.end()
        done = CellDone(
            cell=run.request.cell,
            error=error,
            seconds=time.monotonic() - run.started,
            has_value=value is not None,
            value=dumped.pickled,
            value_repr=short_repr(value, self._hook.plain) if value is not None else "",
            value_note=dumped.why,
            too_large=dumped.too_large,
        )
        self._capture.finish(done)

    def _describe(self, run: CellExecution) -> CellError:
        assert run.error is not None
        return describe(self._shell, run.error, run.when, before_exec=not run.ran)


def _is_good_exit(error: BaseException) -> bool:
    """Return whether code ended itself without a complaint, as elastic training does on a rank that is let go."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def end_child(error: BaseException | None) -> NoReturn:
    """End a process that the cell forked when it leaves the cell's code: it is no second rank.

    Its exit status is that of Python itself; it neither closes nor reports anything that belongs to the rank.
    """
    if error is None:
        status = 0
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    else:
        status = 1
        traceback.print_exception(error)
    # os._exit() flushes no stream.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)

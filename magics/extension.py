"""``%load_ext hvdlab`` and ``%unload_ext hvdlab``: add the magics to a shell, and remove them again.

Users wait for the first of both, so this module and those that it imports leave numpy, the engine and the pool to the thread
that starts the first pool's processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.extensions import ExtensionManager
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.text import format_ranks
from hvdlab.magics.arguments import give_body
from hvdlab.magics.completion import RankCompleter
from hvdlab.magics.debug_magics import DebugMagics, load_debugger, unload_debugger
from hvdlab.magics.notebook_pool import BackgroundPrestart, NotebookPool, SessionBackend
from hvdlab.magics.panel_comms import PanelComms, load_panel
from hvdlab.magics.pool_magics import PoolMagics
from hvdlab.magics.run_magics import AutoMagics, AutoRun, CellMagics
from hvdlab.magics.variable_magics import VariableMagics
from hvdlab.magics.view_magics import OutputMagics, ViewMagics
from hvdlab.widgets.views import add_awaiting, add_finder, remove_awaiting, remove_finder

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool

_ATTRIBUTE = "_hvdlab_extension"
CELL_VIEW = "hvdlab.magics.cell_view"
"""Module that the first cell needs."""
_MISPLACED = re.compile(r"%%hvd_(run|rank)")
"""Matches a cell magic of ours in IPython's error about a line magic of that name, which there is not."""
MAGICS = {
    "line": (
        "hvd_run",
        "hvd_pool",
        "hvd_output",
        "hvd_pull",
        "hvd_push",
        "hvd_where",
        "hvd_debug",
        "hvd_diff",
        "hvd_whos",
        "hvd_replay",
        "hvd_timeline",
        "hvd_metrics",
        "hvd_elastic",
        "hvd_c10d",
        "autohvd",
    ),
    "cell": ("hvd_run", "hvd_rank", "local"),
}


class Extension:
    """Additions of hvdlab to one shell, which :meth:`unload` removes.

    Attributes:
        session: The notebook's pool and the state that magics share.
    """

    def __init__(self, shell: InteractiveShell, session: NotebookPool | None = None) -> None:
        self.shell = shell
        self.session = session or NotebookPool(shell)
        self._auto = AutoRun()
        self._panel: PanelComms | None = None
        self._completer = RankCompleter(self.session, self._auto)

    def load(self) -> None:
        for magics in (
            CellMagics(self.session),
            PoolMagics(self.session),
            VariableMagics(self.session),
            OutputMagics(self.session),
            DebugMagics(self.session),
            ViewMagics(self.session),
            AutoMagics(self.session, self._auto),
        ):
            self.shell.register_magics(magics)
        self.shell.events.register("pre_run_cell", self._remember_cell)
        self.shell.events.register("post_run_cell", self._hint)
        # Before IPython's own, which take a cell magic apart.
        self.shell.input_transformers_cleanup.insert(0, give_body)
        self.shell.input_transformers_cleanup.append(self._auto)
        if (set_backend := self._kernel_takes_ranks()) is not None:
            set_backend(SessionBackend(self.session))
        self._completer.load()
        add_finder(self._pool)
        add_awaiting(self.session.next_recording)
        self._panel = load_panel(self.session)
        load_debugger(self.session, self._auto)
        self._follow_shutdown()
        setattr(self.shell, _ATTRIBUTE, self)

    def prewarm(self) -> None:
        """Begin to start the processes of the first pool, in the background."""
        self.session.prestart = BackgroundPrestart([CELL_VIEW])
        if self.session.ranks_by_default:
            kernel: Any = getattr(self.shell, "kernel", None)
            kernel.start_ranks()

    def unload(self) -> None:
        """Stop the pool and remove the magics."""
        delattr(self.shell, _ATTRIBUTE)
        if (set_backend := self._kernel_takes_ranks()) is not None:
            set_backend(None)
        unload_debugger(self.session)
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
        remove_finder(self._pool)
        remove_awaiting(self.session.next_recording)
        self._completer.unload()
        self.shell.input_transformers_cleanup.remove(self._auto)
        self.shell.input_transformers_cleanup.remove(give_body)
        self.shell.events.unregister("pre_run_cell", self._remember_cell)
        self.shell.events.unregister("post_run_cell", self._hint)
        for kind, names in MAGICS.items():
            for name in names:
                self.shell.magics_manager.magics[kind].pop(name, None)
        self.session.close()

    def _follow_shutdown(self) -> None:
        """Detach from a kept pool as soon as the kernel is asked to end, on its control thread, also while a cell runs.

        Only the message's handler is in time: Jupyter's interrupt before it is delayed by a third of a second, and the other
        steps of a kernel's end come after the cell.
        """
        handlers = getattr(getattr(self.shell, "kernel", None), "control_handlers", None)
        if handlers is None:
            return
        before = handlers["shutdown_request"]

        async def shutdown_request(*args: Any) -> None:
            try:
                self.session.release_kept()
            finally:
                await before(*args)

        handlers["shutdown_request"] = shutdown_request
        self.session.leaving.callback(handlers.__setitem__, "shutdown_request", before)

    def _kernel_takes_ranks(self) -> Callable[[SessionBackend | None], None] | None:
        """Return the method by which a kernel whose cells run on ranks gets them; None for any other kernel."""
        found: Callable[[SessionBackend | None], None] | None = getattr(
            getattr(self.shell, "kernel", None), "set_backend", None
        )
        return found

    def _pool(self) -> Pool | None:
        return self.session.pool

    def _remember_cell(self, info: Any) -> None:
        self.session.raw_cell = info.raw_cell or ""

    def _hint(self, result: Any) -> None:
        """Print where a name lives, or where a magic belongs, after a cell of the notebook's own process that failed by it."""
        error = getattr(result, "error_in_exec", None)
        if isinstance(error, UsageError) and (magic := _MISPLACED.search(str(error))):
            print(f"`{magic[0]}` must be the first line of its cell; put what stands above it below")
        elif (
            type(error) is NameError
            and not self.session.ranks_by_default
            and (where := self.session.ranks_that_have(error.name or ""))
        ):
            print(f"`{error.name}` exists on {format_ranks(where)}: put `%%hvd_run` on top")


def extension_of(shell: InteractiveShell) -> Extension | None:
    """Return the extension that is loaded into this shell; None if none is."""
    found: Extension | None = getattr(shell, _ATTRIBUTE, None)
    return found


def pool() -> Pool:
    """Return the notebook's pool: the ranks that ``%%hvd_run`` cells run on.

    Raises:
        InvalidRequestError: No ranks are running, or this process is a rank.
    """
    shell = get_ipython()
    extension = extension_of(shell) if shell is not None else None
    found = extension.session.pool if extension is not None else None
    if found is not None:
        return found
    from hvdlab.collectives import context  # imports the engine, and so numpy

    if context.in_rank_of_pool():
        raise InvalidRequestError(
            "this is a rank; the notebook's process has the pool: call hvdlab.pool() in a cell without %%hvd_run, or under %%local"
        )
    raise InvalidRequestError(
        "no ranks are running: start some with `%hvd_pool start -np 8` or a %%hvd_run cell, or with hvdlab.Pool.start()"
    )


def load(shell: InteractiveShell) -> None:
    """Load the extension into a shell; a second time nothing happens."""
    if extension_of(shell) is not None:
        return
    extension = Extension(shell)
    extension.load()
    extension.prewarm()


def unload(shell: InteractiveShell) -> None:
    """Unload the extension, and print how many ranks ended with it; does nothing if it is not loaded, or only reloaded.

    ``%reload_ext`` unloads, imports the package's root again and loads. Users put it into their first cell, so that they can
    run that again: this must not cost the ranks and hours of training. Nothing in the root would be renewed by loading
    again, so all of it stays.
    """
    extension = extension_of(shell)
    if extension is None or _reloading():
        return
    farewell = _farewell(extension.session.pool)
    extension.unload()
    if farewell:
        print(farewell)


def _reloading() -> bool:
    """Return whether ``%reload_ext`` is the caller. IPython calls an extension's unloading in both cases."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is ExtensionManager.reload_extension.__code__:
            return True
        frame = frame.f_back
    return False


def _farewell(pool: Pool | None) -> str:
    """Return the sentence for the user about the end of this pool, or about leaving it."""
    if pool is None:
        return ""
    count = pool.size - len(pool.lost)
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    if pool.name:
        goes = "goes" if count == 1 else "go"
        return f"let go of {ranks}, which {goes} on; `%hvd_pool attach {pool.name}` comes back to them"
    return f"ended {ranks}, and all variables there"

"""``%load_ext hvdlab`` and ``%unload_ext hvdlab``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core.extensions import ExtensionManager
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives import context
from hvdlab.magics.ahead import Ahead
from hvdlab.magics.autohvd import AutoMagics, AutoRun
from hvdlab.magics.c10d import C10dMagics
from hvdlab.magics.cells import CellMagics
from hvdlab.magics.completion import RankCompleter
from hvdlab.magics.debug import DebugMagics
from hvdlab.magics.debugger import load_debugger, unload_debugger
from hvdlab.magics.diff import DiffMagics
from hvdlab.magics.elastic import ElasticMagics
from hvdlab.magics.exchange import ExchangeMagics
from hvdlab.magics.metrics import MetricsMagics
from hvdlab.magics.output import OutputMagics
from hvdlab.magics.panel import PanelComms, load_panel
from hvdlab.magics.pools import PoolMagics
from hvdlab.magics.replay import ReplayMagics
from hvdlab.magics.session import Session
from hvdlab.magics.spmd import KernelRanks
from hvdlab.magics.syntax import give_body
from hvdlab.magics.timeline import TimelineMagics
from hvdlab.magics.where import WhereMagics
from hvdlab.magics.whos import WhosMagics
from hvdlab.widgets.source import add_awaiting, add_finder, remove_awaiting, remove_finder

if TYPE_CHECKING:
    from hvdlab.kernel_ext.pool import Pool

_ATTRIBUTE = "_hvdlab_extension"
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
    """Everything that loading adds to one shell; :meth:`unload` takes it away again.

    Attributes:
        session: The pool and what belongs to it.
    """

    def __init__(self, shell: InteractiveShell, session: Session | None = None) -> None:
        self.shell = shell
        self.session = session or Session(shell)
        self._auto = AutoRun()
        self._panel: PanelComms | None = None
        self._completer = RankCompleter(self.session, lambda: self._auto.on)

    def load(self) -> None:
        for magics in (
            CellMagics(self.session),
            PoolMagics(self.session),
            ExchangeMagics(self.session),
            OutputMagics(self.session),
            WhereMagics(self.session),
            DebugMagics(self.session),
            DiffMagics(self.session),
            WhosMagics(self.session),
            ReplayMagics(self.session),
            TimelineMagics(self.session),
            MetricsMagics(self.session),
            ElasticMagics(self.session),
            C10dMagics(self.session),
            AutoMagics(self.session, self._auto),
        ):
            self.shell.register_magics(magics)
        self.shell.events.register("pre_run_cell", self._remember_cell)
        # Before IPython's own, which take a cell magic apart.
        self.shell.input_transformers_cleanup.insert(0, give_body)
        self.shell.input_transformers_cleanup.append(self._auto)
        if (take_ranks := self._kernel_takes_ranks()) is not None:
            take_ranks(KernelRanks(self.session))
        self._completer.load()
        add_finder(self._pool)
        add_awaiting(self.session.awaited)
        self._panel = load_panel(self.session)
        load_debugger(self.session, self._auto)
        setattr(self.shell, _ATTRIBUTE, self)

    def prewarm(self) -> None:
        """Begin to start what the first pool needs, in the background."""
        self.session.ahead = None if context.in_rank_of_pool() else Ahead()  # a rank starts no pool
        if self.session.ranks_by_default:
            kernel: Any = getattr(self.shell, "kernel", None)
            kernel.start_ranks()

    def unload(self) -> None:
        """Stop the pool and remove the magics."""
        delattr(self.shell, _ATTRIBUTE)
        if (take_ranks := self._kernel_takes_ranks()) is not None:
            take_ranks(None)
        unload_debugger(self.session)
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
        remove_finder(self._pool)
        remove_awaiting(self.session.awaited)
        self._completer.unload()
        self.shell.input_transformers_cleanup.remove(self._auto)
        self.shell.input_transformers_cleanup.remove(give_body)
        self.shell.events.unregister("pre_run_cell", self._remember_cell)
        for kind, names in MAGICS.items():
            for name in names:
                self.shell.magics_manager.magics[kind].pop(name, None)
        self.session.close()

    def _kernel_takes_ranks(self) -> Callable[[KernelRanks | None], None] | None:
        """The method by which a kernel whose cells run on ranks takes them; None for any other kernel."""
        found: Callable[[KernelRanks | None], None] | None = getattr(
            getattr(self.shell, "kernel", None), "take_ranks", None
        )
        return found

    def _pool(self) -> Pool | None:
        return self.session.pool

    def _remember_cell(self, info: Any) -> None:
        self.session.raw_cell = info.raw_cell or ""


def extension_of(shell: InteractiveShell) -> Extension | None:
    """The extension that is loaded into this shell."""
    found: Extension | None = getattr(shell, _ATTRIBUTE, None)
    return found


def load(shell: InteractiveShell) -> None:
    """Load into a shell; a second time nothing happens."""
    if extension_of(shell) is not None:
        return
    extension = Extension(shell)
    extension.load()
    extension.prewarm()


def unload(shell: InteractiveShell) -> None:
    """Unload the extension, and print how many ranks ended with it; does nothing if it is not loaded, or only reloaded.

    ``%reload_ext`` unloads, imports the package's root again and loads. Users put it into their first cell, so that they can
    run that again: this must not cost the ranks and hours of training. Nothing in the root would be renewed by loading
    again, so everything stays as it is.
    """
    extension = extension_of(shell)
    if extension is None or _reloading():
        return
    farewell = _farewell(extension.session.pool)
    extension.unload()
    if farewell:
        print(farewell)


def _reloading() -> bool:
    """Whether ``%reload_ext`` is the caller. IPython tells an extension only that it is unloaded."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is ExtensionManager.reload_extension.__code__:
            return True
        frame = frame.f_back
    return False


def _farewell(pool: Pool | None) -> str:
    """The sentence for the user once this pool is let go of."""
    if pool is None:
        return ""
    count = pool.size - len(pool.lost)
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    if pool.name:
        goes = "goes" if count == 1 else "go"
        return f"let go of {ranks}, which {goes} on; `%hvd_pool attach {pool.name}` comes back to them"
    return f"ended {ranks}, and all variables there"

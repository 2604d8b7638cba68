"""Changes to an InteractiveShell that make it a rank's: its standard streams, its answer to ``input()``, its plots.

``display()``, figures and values of expressions are sent as :class:`Display`, in order with the text.
"""

from __future__ import annotations

import bdb
import builtins
import faulthandler
import functools
import getpass
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError

from hvdlab.kernel_ext.rank.cell_source import CellCompiler, LinePrefilter, StaticTransforms
from hvdlab.kernel_ext.rank.debugger import DebuggerImports, make_breakpoint, stop_here
from hvdlab.kernel_ext.rank.errors import one_line, safe_str
from hvdlab.kernel_ext.rank.output import OutputQueue, RankStream
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.rank.stdin import RankStdin
from hvdlab.kernel_ext.wire.cells import Clear, Display
from hvdlab.kernel_ext.wire.codec import wire_text, wire_value

NOTEBOOKS_MAGICS = (
    "autohvd",
    "hvd_c10d",
    "hvd_debug",
    "hvd_diff",
    "hvd_elastic",
    "hvd_metrics",
    "hvd_output",
    "hvd_pool",
    "hvd_pull",
    "hvd_push",
    "hvd_rank",
    "hvd_replay",
    "hvd_run",
    "hvd_timeline",
    "hvd_where",
    "hvd_whos",
    "local",
)
"""The magics of the notebook's extension. A cell magic that is not at the top of its cell is looked up as a line magic,
with the second of its signs as a part of its name."""

INLINE = "module://matplotlib_inline.backend_inline"


class ShellSetup:
    """Everything of the process and the shell that a rank replaces, and how to put it back.

    Attributes:
        hook: The display hook of the rank.
        preparing: Asked when IPython wants to show an error: True while a cell is compiled, whose error is reported
            with the cell.
    """

    def __init__(
        self,
        shell: Any,
        capture: OutputQueue,
        compiler: CellCompiler,
        fds: FdCapture | None,
        prompting: RankStdin,
    ) -> None:
        self._prompting = prompting
        self._shell = shell
        self._fds = fds
        self.preparing: Callable[[], bool] = lambda: False
        names = ("stdout", 1), ("stderr", 2)
        self._streams = {
            name: RankStream(capture, name, fd if fds is not None else None) for name, fd in names
        }
        self.hook = RankDisplayHook(capture, parent=shell, shell=shell, cache_size=shell.cache_size)
        self._parts = {
            "displayhook": self.hook,
            "display_pub": RankDisplayPublisher(capture, parent=shell, shell=shell),
            "compile": compiler,
        }
        self._saved_parts: dict[str, Any] = {}
        self._saved_streams: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Replace it all."""
        self.resume()
        self._patch(builtins, "input", self._prompting.input)
        self._patch(getpass, "getpass", self._prompting.getpass)
        self._patch(sys, "breakpointhook", make_breakpoint(sys.breakpointhook))
        self._patch(bdb.Bdb, "stop_here", stop_here)
        debuggers = DebuggerImports()
        sys.meta_path.insert(0, debuggers)
        self._undo.append(functools.partial(sys.meta_path.remove, debuggers))
        transformers = self._shell.input_transformer_manager
        self._patch(transformers, "transform_cell", StaticTransforms(transformers).transform_cell)
        prefilters = self._shell.prefilter_manager
        self._patch(prefilters, "prefilter_lines", LinePrefilter(self._shell).prefilter_lines)
        # Code that reads sys.stdin itself gets an end of file: no terminal is behind it that could answer.
        self._patch(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115  # closed by uninstall
        self._undo.append(sys.stdin.close)
        self._shell._showtraceback = self._show_traceback
        self._shell.ask_exit = _exit_cell
        self._shell.enable_gui = _no_windows
        self._shell._format_exception_for_storage = _exception_for_history
        self._refuse_notebooks_magics()
        # As long as the rank lives: IPython would change the builtins, and change them back, for each cell.
        trap = self._shell.builtin_trap
        trap.__enter__()
        self._undo.append(functools.partial(trap.__exit__, None, None, None))
        if not faulthandler.is_enabled():
            # Not into our own pipe: this process reads it itself, so a dump at its death would stay unread.
            faulthandler.enable(self._fds.originals["stderr"] if self._fds is not None else 2)
            self._undo.append(faulthandler.disable)
        prepare_plots()
        prepare_progress_bars()

    def uninstall(self) -> None:
        """Put it all back."""
        self.pause()
        while self._undo:
            self._undo.pop()()
        # They were set on the instance only: the methods of its class are in force again.
        del self._shell._showtraceback, self._shell.ask_exit, self._shell.enable_gui
        del self._shell._format_exception_for_storage

    def pause(self) -> None:
        """Put the shell's own parts and streams back, until :meth:`resume`."""
        for name, part in self._saved_parts.items():
            setattr(self._shell, name, part)
        # The trap has a reference of its own, which it installs as sys.displayhook around each cell.
        self._shell.display_trap.hook = self._shell.displayhook
        for name, stream in self._saved_streams.items():
            setattr(sys, name, stream)
        self._saved_parts, self._saved_streams = {}, {}

    def resume(self) -> None:
        """Take shell and streams for the rank."""
        self._saved_parts = {name: getattr(self._shell, name) for name in self._parts}
        self._saved_streams = {name: getattr(sys, name) for name in self._streams}
        for name, part in self._parts.items():
            setattr(self._shell, name, part)
        self._shell.display_trap.hook = self.hook
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _refuse_notebooks_magics(self) -> None:
        """Register magics that say where those of the notebook's extension belong."""
        known = self._shell.magics_manager.magics
        names = {
            "line": (*NOTEBOOKS_MAGICS, *(f"%{name}" for name in NOTEBOOKS_MAGICS)),
            "cell": NOTEBOOKS_MAGICS,
        }
        for kind, own in names.items():
            for name in own:
                if name not in known[kind]:
                    refuse = known[kind][name] = functools.partial(_refuse_magic, name)
                    self._undo.append(functools.partial(_remove_magic, known[kind], name, refuse))

    def _show_traceback(self, etype: Any, evalue: BaseException, stb: list[str]) -> None:
        """Print IPython's messages beside the cell's own error, such as for ``%tb`` or a figure that can't be drawn."""
        if not self._saved_parts:
            type(self._shell)._showtraceback(self._shell, etype, evalue, stb)
        elif not self.preparing():
            print(self._shell.InteractiveTB.stb2text(stb), file=sys.stderr)


def _refuse_magic(name: str, line: str, cell: str = "") -> None:
    """Raise the error of a magic that a rank can not have."""
    raise UsageError(
        f"`%{name}` is a magic of the notebook, and this is a rank: give it a cell of its own, without %%hvd_run "
        "above it"
    )


def _remove_magic(known: dict[str, Any], name: str, refuse: Callable[..., None]) -> None:
    """Remove a refusal, unless the user has loaded the extension over it."""
    if known.get(name) is refuse:
        del known[name]


def _exit_cell() -> None:
    """``exit`` in a cell ends the cell; ranks are ended by ``%hvd_pool stop``."""
    raise SystemExit("exit ends the cell, not the rank; `%hvd_pool stop` ends the ranks")


def _exception_for_history(error: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the part of an error that IPython keeps for ``%notebook``: its text, as the notebook has the traceback.

    IPython would render one, with the frames that are hvdlab's: a tenth of a second of CPU on each rank, before the cell ends.
    """
    return {"ename": type(error).__name__, "evalue": safe_str(error), "traceback": []}


def _no_windows(gui: str | None = None) -> None:
    """``%matplotlib inline`` is how a rank draws anyway; for anything with a window it has no screen."""
    if gui not in (None, "inline"):
        raise UsageError(f"a rank has no screen for {gui!r}; figures are drawn inline, below the cell")


def prepare_plots() -> None:
    """Let matplotlib draw inline in this process, unless the user chose a backend. Idempotent, also before a fork."""
    os.environ.setdefault("MPLBACKEND", INLINE)
    matplotlib = sys.modules.get("matplotlib")
    if matplotlib is not None and matplotlib.rcParams._get_backend_or_none() is None:
        # matplotlib reads the variable when it is imported, which a preload may have done earlier.
        matplotlib.use(os.environ["MPLBACKEND"])
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    if inline is not None:  # imported before there was a shell to draw for
        inline._enable_matplotlib_integration()


def prepare_progress_bars() -> None:
    """Let ``tqdm.auto`` and ``tqdm.notebook`` mean tqdm's text bar, as a rank has no widgets. Idempotent.

    tqdm chooses when it is imported, by looking at the modules and the environment; call this before whatever may
    import it (in a process that ranks are forked from as well).
    """
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())
    for name in ("tqdm.auto", *_TextBars.NAMES):
        module = sys.modules.get(name)
        if module is not None and not getattr(module, "_hvdlab_text", False):
            del sys.modules[name]


class _TextBars(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``tqdm.notebook`` and ``tqdm.autonotebook`` as thin modules over ``tqdm.std``."""

    NAMES = ("tqdm.notebook", "tqdm.autonotebook")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in self.NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm import std

        bars = {"tqdm": std.tqdm, "trange": std.trange, "tqdm_notebook": std.tqdm, "tnrange": std.trange}
        vars(module).update(bars, __all__=list(bars), _hvdlab_text=True)


LONGEST_TEXT = 1 << 20
"""Characters of a ``text/plain`` that are shown."""
LONGEST_BEGINNING = 1000
"""Characters of a longer text that are shown as a value."""
LARGEST_ITEM = 16 << 20
"""Bytes of one representation of a display; no browser shows more."""


class RankDisplayHook(DisplayHook):
    """Sends the value of a cell's last expression and keeps ``_``, ``__``, ``Out`` as IPython does."""

    #: IPython sets it twice for each cell. A plain attribute in the place of a trait spares a rank what traits do when they are set.
    exec_result: Any = None

    def __init__(self, capture: OutputQueue, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]  # IPython is partly untyped
        self._capture = capture
        self.plain = ""
        """``text/plain`` of the last value."""
        self.remembers = True
        """Whether the cell that runs is one of the notebook's: its value becomes ``_`` and ``Out[n]``."""

    def __call__(self, result: Any = None) -> None:
        """Show the value. After a ``;`` it is not shown, but still is the cell's value."""
        super().__call__(result)  # type: ignore[no-untyped-call]  # as above
        if result is not None and self.quiet():  # type: ignore[no-untyped-call]  # as above
            self.fill_exec_result(result)  # type: ignore[no-untyped-call]  # as above

    def update_user_ns(self, result: Any) -> None:
        """Keep the value for the user."""
        if self.remembers:
            super().update_user_ns(result)  # type: ignore[no-untyped-call]  # as above

    def compute_format_data(self, result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a value in the formats to show; of a text too long to be shown only the beginning is formatted."""
        if isinstance(result, (str, bytes, bytearray)) and len(result) > LONGEST_TEXT:
            shown = f"{result[:LONGEST_BEGINNING]!r}… ({len(result):,} {'characters' if isinstance(result, str) else 'bytes'} in all)"
            return {"text/plain": shown}, {}
        found: tuple[dict[str, Any], dict[str, Any]] = super().compute_format_data(result)  # type: ignore[no-untyped-call]  # IPython is partly untyped
        return found

    def start_displayhook(self) -> None:
        """Nothing to prepare."""
        self._is_active = True

    def write_output_prompt(self) -> None:
        """Write nothing: the notebook writes the prompt."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Send the value's representations."""
        self.plain = str(format_dict.get("text/plain", ""))
        self._capture.put(Display(wire_bundle(format_dict), wire_bundle(md_dict or {}), result=True))

    def finish_displayhook(self) -> None:
        """Nothing to finish."""
        self._is_active = False

    def set_parent(self, parent: Any) -> None:
        """Messages of the Jupyter protocol have parents, cells of a pool have none."""


class RankDisplayPublisher(DisplayPublisher):
    """Sends what ``display``, ``update_display`` and ``clear_output`` publish."""

    def __init__(self, capture: OutputQueue, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]  # IPython is partly untyped
        self._capture = capture

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *args: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send a display, or with ``update`` a new content for the ones of its ``display_id``."""
        self._validate_data(data, metadata)  # type: ignore[no-untyped-call]  # as above
        display_id = wire_text(str((transient or {}).get("display_id", "")))
        self._capture.put(
            Display(
                wire_bundle(data), wire_bundle(metadata or {}), display_id=display_id, update=bool(update)
            )
        )

    def clear_output(self, wait: bool = False) -> None:
        """Clear what this rank's cell has shown so far."""
        self._capture.put(Clear(bool(wait)))

    def set_parent(self, parent: Any) -> None:
        """Ignored, as by the hook: cells of a pool have no parents."""


def wire_bundle(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a mime bundle that MessagePack and JSON can carry: images in base64, ``text/plain`` and the size bounded.

    ``text/plain`` names what can't be sent, with the reason; it never fails the cell that shows it.
    """
    clean: dict[str, Any] = {}
    missing: list[str] = []
    for key, value in bundle.items():
        try:
            size = _size(value)
            # A text of any size is kept, and cut below: its beginning says more than a line about its size.
            if size <= LARGEST_ITEM or key == "text/plain":
                clean[wire_text(str(key))] = wire_value(value)
            else:
                missing.append(
                    f"({key} of {size:,} bytes is too large to be shown; write it to a file instead)"
                )
        except Exception as error:  # noqa: BLE001  # the user's own methods may raise anything
            missing.append(f"({wire_text(str(key))} can't be sent: {one_line(error)})")
    text = clean.get("text/plain")
    if isinstance(text, str) and len(text) > LONGEST_TEXT:
        clean["text/plain"] = f"{text[:LONGEST_TEXT]}… ({len(text)} characters in all)"
    if missing:
        clean["text/plain"] = "\n".join([str(clean.get("text/plain", "")), *missing]).strip()
    return clean


def _size(value: Any) -> int:
    """Return the number of bytes that a representation takes, about."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return sum(map(_size, value))
    return 8

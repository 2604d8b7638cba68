"""What the warm process imports before it forks, so that ranks get it at once and share its memory."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence

from hvdlab.bindings import framework_hooks
from hvdlab.bindings.framework_hooks import hooks_of
from hvdlab.kernel_ext.warm.messages import Loaded

OWN = ("hvdlab.kernel_ext.rank.app",)
"""What every rank runs; an import error here is a broken installation."""

LATER = (
    "pygments.lexers.python",
    "pygments.formatters.terminal256",
    "stack_data",
    "hvdlab.kernel_ext.launchers.controller",
)
"""Wanted soon after the first cell (to show a traceback, to join ipyparallel); imported when nothing else is to do."""


def modules_to_load(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The user's list: ``HVDLAB_PRELOAD`` (names separated by commas), else the frameworks that are usual and installed."""
    wanted = environ.get("HVDLAB_PRELOAD")
    if wanted is None:
        return tuple(name for name in framework_hooks.names() if hooks_of(name).preload and _installed(name))
    return tuple(name.strip() for name in wanted.split(",") if name.strip())


def load(names: Sequence[str]) -> Loaded:
    """Import the modules; what fails is told, not raised."""
    began = time.monotonic()
    loaded: list[str] = []
    failed: dict[str, str] = {}
    for name in (*OWN, *names):
        _load_one(name, loaded, failed)
        if name == OWN[-1] and name in loaded:
            _prepare_progress_bars()
        binding = (
            hooks_of(name).binding if name in framework_hooks.names() else ""
        )  # ours comes along with its framework
        if binding and name in loaded and _installed(binding):
            _load_one(binding, loaded, failed)
    return Loaded(tuple(loaded), failed, time.monotonic() - began)


def _prepare_progress_bars() -> None:
    """tqdm chooses between text and widget when it is imported, and what the user preloads may import it."""
    from hvdlab.kernel_ext.rank.shell import prepare_progress_bars

    prepare_progress_bars()


def load_later(name: str) -> None:
    """Import a module that is only wanted to be quick; whoever needs it gets the error."""
    try:
        importlib.import_module(name)
    # Not only for want of the module: there may be no descriptor to read it, say.
    except Exception:  # noqa: BLE001
        return


def _load_one(name: str, loaded: list[str], failed: dict[str, str]) -> None:
    try:
        importlib.import_module(name)
    # A module may fail in any way while it is imported; each is an answer here, none may end the warm process.
    except BaseException as error:  # noqa: BLE001
        failed[name] = f"{type(error).__name__}: {error}"
    else:
        loaded.append(name)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

"""What the fork server imports before it forks, so that ranks get it at once and share its memory."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence

from hvdlab.launch.forkserver.messages import Loaded
from hvdlab.launch.forkserver.program import Preloads


def modules_to_load(program: Preloads, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The user's list ``HVDLAB_PRELOAD`` (names separated by commas), else the usual frameworks that are installed."""
    wanted = environ.get("HVDLAB_PRELOAD")
    if wanted is None:
        return tuple(name for name in program.usual() if _installed(name))
    return tuple(name.strip() for name in wanted.split(",") if name.strip())


def load(program: Preloads, names: Sequence[str]) -> Loaded:
    """Import what the program needs, then these modules. Failures are in the result and not raised."""
    began = time.monotonic()
    loaded: list[str] = []
    failed: dict[str, str] = {}
    for name in program.required:
        _load_one(name, loaded, failed)
    if not failed:
        program.after_required()
    for name in names:
        _load_one(name, loaded, failed)
        for ours in program.along_with(name) if name in loaded else ():
            if _installed(ours):
                _load_one(ours, loaded, failed)
    return Loaded(tuple(loaded), failed, time.monotonic() - began)


def load_later(name: str) -> None:
    """Import a module ahead of its use; if that fails, the code that uses it gets the error."""
    try:
        importlib.import_module(name)
    # Any error: the module may exist, and there may be no descriptor left to read it, say.
    except Exception:  # noqa: BLE001
        return


def _load_one(name: str, loaded: list[str], failed: dict[str, str]) -> None:
    try:
        importlib.import_module(name)
    # A module may fail in any way while it is imported; each is an answer here, none may end the fork server.
    except BaseException as error:  # noqa: BLE001
        failed[name] = f"{type(error).__name__}: {error}"
    else:
        loaded.append(name)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False

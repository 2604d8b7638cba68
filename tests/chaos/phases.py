"""Places inside a collective at which a fault can strike: code that is called when a rank gets there, in that rank.

A place is the beginning (or the end) of a function of the engine or of a plane, wrapped for one strike and given back
afterwards. Nothing but the rank that is hit is touched, and nothing of the product knows.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

Place = tuple[str, str, str, bool]
"""Module, class, method, and whether the strike comes after it instead of before."""

_SHM = "hvdlab.collectives.planes.shm"
_GLOO = "hvdlab.collectives.planes.gloo"
_STAGING = "hvdlab.collectives.planes.host"
_CUDA = "hvdlab.collectives.planes.gpu.ipc_group"
_ENDPOINT = ("hvdlab.collectives.protocol.endpoint", "Endpoint", "send_all")
_SHM_STEPS = ("SlicedReduction", "AllGather", "Broadcast", "AllToAll", "ReduceScatter")

PLACES: dict[str, dict[str, list[Place]]] = {
    "shm": {
        "announce": [(*_ENDPOINT, False)],
        "negotiate": [(*_ENDPOINT, True)],
        "pack": [(f"{_SHM}.schedules", name, "fill", False) for name in _SHM_STEPS],
        "transfer": [
            (f"{_SHM}.schedules", "SlicedReduction", "fold", False),
            (f"{_SHM}.signals", "Signals", "wait", False),
        ],
        "unpack": [(f"{_SHM}.schedules", name, "take", False) for name in _SHM_STEPS],
    },
    "gloo": {
        "announce": [(*_ENDPOINT, False)],
        "negotiate": [(*_ENDPOINT, True)],
        "pack": [(_STAGING, "Staging", "pack", False), (_STAGING, "Staging", "widened", False)],
        "transfer": [(_GLOO, "GlooPlane", "_wait", False), (_GLOO, "GlooPlane", "_wait", True)],
        "unpack": [(_STAGING, "Staging", "unpack", False)],
    },
    "cuda/ipc": {
        "announce": [(*_ENDPOINT, False)],
        "negotiate": [(*_ENDPOINT, True)],
        "pack": [(_CUDA, "IpcGroup", "_announce", False)],
        "transfer": [(_CUDA, "IpcGroup", "_begin", True), (_CUDA, "IpcWorker", "work", False)],
        "unpack": [(_CUDA, "IpcGroup", "_outcome", False), (_CUDA, "IpcGroup", "_measure", False)],
    },
}
"""By data plane and phase. In ``negotiate`` the announcement has left and the order to execute has not come."""

PHASES = ("announce", "negotiate", "pack", "transfer", "unpack")


class Ambush:
    """Ambush that strikes once, when the wrapped functions have been called so often.

    Args:
        plane, phase: Where.
        after: At which call of any of the functions.
        strike: The act there, on whichever thread it is.
    """

    def __init__(self, plane: str, phase: str, after: int, strike: Callable[[], object]) -> None:
        self._left = after
        self._strike = strike
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        announcing = phase in ("announce", "negotiate")
        for module, name, method, late in PLACES[plane][phase]:
            cls = getattr(importlib.import_module(module), name)
            self._wrap(cls, method, late, announcing)

    def _wrap(self, cls: Any, method: str, late: bool, announcing: bool) -> None:
        original = cls.__dict__[method]

        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            meant = not announcing or any(type(message).__name__ == "Announce" for message in args[0])
            if meant and not late:
                self._count()
            result = original(this, *args, **kwargs)
            if meant and late:
                self._count()
            return result

        setattr(cls, method, wrapped)
        self._undo.append(lambda: setattr(cls, method, original))

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self._strike()

    def lift(self) -> None:
        """Give the functions back."""
        while self._undo:
            self._undo.pop()()

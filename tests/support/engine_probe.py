"""Access to the parts of a rank's engine that its public interface does not show."""

from __future__ import annotations

import threading
from typing import Any

from hvdlab.collectives.engine.engine import Engine
from support.patience import PATIENCE


class EngineProbe:
    """Probe of an engine: its parts as they are now, some of which a reconnect replaces."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Any = engine

    def wait_for_records(self) -> None:
        """Wait until the operations that have ended are recorded: a thread that executes one ends its handle first."""
        recorded = threading.Event()
        self.executor.enqueue(recorded.set)
        self.executor.wake()
        assert recorded.wait(PATIENCE), "the executor does not come to its next job"

    @property
    def locked(self) -> Any:
        """Return the rank's state under its lock."""
        return self._engine._locked

    @property
    def executor(self) -> Any:
        """Return the threads that execute operations."""
        return self._engine._executor

    @property
    def spans(self) -> Any:
        """Return the log of spans."""
        return self._engine._spans

    @property
    def endpoint(self) -> Any:
        """Return the connection to the coordinator."""
        return self._engine._endpoint

    @property
    def handlers(self) -> Any:
        """Return the handlers of the coordinator's messages."""
        return self._engine._handlers

    @property
    def control(self) -> Any:
        """Return the control thread."""
        return self._engine._control

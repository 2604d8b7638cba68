"""The panel of JupyterLab in this kernel: two comms that every page knows by their names, and the pools it can show.

The names are fixed, so that a page that was loaded again finds the comms also while a cell runs. One comm only sends and the
other only receives: once a comm has sent from a cell, ipykernel would let messages to it wait for the running cell.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.magics.notebook_pool import NotebookPool

if TYPE_CHECKING:
    from hvdlab.collectives.client import Client
    from hvdlab.collectives.tracing.recording import Recording
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.widgets.panel import Panel

TARGET = "hvdlab"
STREAM, REQUESTS = "hvdlab-stream", "hvdlab-requests"
KEPT, VARIABLE = "kept:", "variable:"
PROTOCOL = 1
CONNECT_WITHIN = 5.0

Content = Mapping[str, Any]


class PanelComms:
    """Comms for pages of JupyterLab. They cost next to nothing until a page opens one.

    Args:
        session: The notebook's session.
    """

    def __init__(self, session: NotebookPool) -> None:
        from comm import create_comm, get_comm_manager

        self._session = session
        self._backend = NotebookPanelBackend(session)
        self._starting = threading.Lock()
        self._panel: Panel | None = None
        self._closed = False
        self._stream = create_comm(target_name=TARGET, comm_id=STREAM, primary=False)
        self._requests = create_comm(target_name=TARGET, comm_id=REQUESTS, primary=False)
        # Before the comms are registered: from then on a page's message finds them, perhaps on another thread.
        self._requests.on_msg(self._receive)
        for comm in (self._stream, self._requests):
            get_comm_manager().register_comm(comm)
        session.watchers.append(self._pool_changed)
        # A page that is open already need not poll for the extension.
        self._send({"type": "here", "protocol": PROTOCOL}, [])

    def close(self) -> None:
        """Close the comms, by which the pages learn that no further message comes."""
        # First: feeds run until they are closed below, and `_send` drops their messages.
        self._closed = True
        self._session.watchers.remove(self._pool_changed)
        with self._starting:
            panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()
        self._backend.close()
        for comm in (self._requests, self._stream):
            comm.close()

    def _receive(self, message: Mapping[str, Any]) -> None:
        from hvdlab.widgets.panel import LONG_LEASE, Panel

        content = message["content"]["data"]
        with self._starting:
            if self._panel is None and not self._closed:
                self._panel = Panel(self._send, self._backend)
            panel = self._panel
        if panel is not None and isinstance(content, dict):
            # On the main thread no message of the page arrives while a cell runs, so this one holds longer.
            waits = threading.current_thread() is threading.main_thread()
            panel.receive(content, lease=LONG_LEASE if waits else None)

    def _pool_changed(self) -> None:
        with self._starting:
            panel = self._panel
        if panel is not None:
            panel.pool_changed()

    def _send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        if not self._closed:
            self._stream.send(message, buffers=buffers)


class NotebookPanelBackend:
    """Backend of the panel: the notebook's own pool, those in its variables, and those that are kept on this host."""

    def __init__(self, session: NotebookPool) -> None:
        self._session = session
        self._last: weakref.ref[Recording] | None = None
        self._watched: dict[str, Client] = {}
        self._watching = threading.Lock()

    def recording(self, pool: str) -> Recording | None:
        if not pool:
            own = self._session.pool_unchecked
            if own is None or own.state == "stopped":
                return self._last() if self._last is not None else None
            recording = own.client.recording
            # Weak: the panel alone must not keep a million rows of a pool that has ended.
            self._last = weakref.ref(recording)
            return recording
        return self._client(pool).recording

    def changeable(self, pool: str) -> Pool | None:
        if not pool:
            own = self._session.pool_unchecked
            return None if own is None or own.state == "stopped" else own
        return self._in_variables().get(pool.removeprefix(VARIABLE)) if pool.startswith(VARIABLE) else None

    def pools(self) -> list[dict[str, Any]]:
        from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry

        own = self._session.pool_unchecked
        found = [{"id": "", "kind": "own", "name": own.name if own else "", "size": own.size if own else 0}]
        for name, pool in self._in_variables().items():
            if pool is not own:
                found.append({"id": VARIABLE + name, "kind": "variable", "name": name, "size": pool.size})
        for kept in KeptPoolRegistry().all():
            if own is None or kept.name != own.name:
                found.append({"id": KEPT + kept.name, "kind": "kept", "name": kept.name, "size": kept.size})
        return found

    def run_command(self, what: str, content: Content) -> dict[str, Any]:
        pool = str(content.get("pool", ""))
        if what == "save":
            path = Path.cwd() / f"ranks-{datetime.now():%Y-%m-%d-%H%M%S}.json.gz"
            self._save(pool, path)
            return {"path": str(path), "name": path.name, "size": path.stat().st_size}
        raise InvalidRequestError(f"this version of hvdlab can't do `{what}`")

    def close(self) -> None:
        """Close the connections to pools that this notebook only watches."""
        with self._watching:
            watched, self._watched = self._watched, {}
        for client in watched.values():
            client.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _in_variables(self) -> dict[str, Pool]:
        from hvdlab.kernel_ext.notebook.pool import Pool

        names = dict(self._session.shell.user_ns)  # a cell may bind others meanwhile
        return {
            name: value
            for name, value in names.items()
            if isinstance(value, Pool) and not name.startswith("_") and value.state != "stopped"
        }

    def _client(self, pool: str) -> Client:
        if pool.startswith(VARIABLE):
            found = self._in_variables().get(pool.removeprefix(VARIABLE))
            if found is None:
                raise InvalidRequestError(
                    f"there is no pool `{pool.removeprefix(VARIABLE)}` in this notebook"
                )
            return found.client
        if pool.startswith(KEPT):
            return self._watch(pool.removeprefix(KEPT))
        raise InvalidRequestError(f"there is no pool `{pool}`")

    def _watch(self, name: str) -> Client:
        """Return a connection that only watches: the process that uses the pool keeps it."""
        from hvdlab.collectives.client import Client
        from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry

        with self._watching:
            # Also of other pools: a connection that has ended keeps a recording, which takes memory.
            self._watched = {known: one for known, one in self._watched.items() if not one.closed}
            if (client := self._watched.get(name)) is not None:
                return client
            kept = KeptPoolRegistry().get(name)
            client = Client.connect(kept.address, kept.client_token, timeout=CONNECT_WITHIN)
            self._watched[name] = client
            return client

    def _save(self, pool: str, path: Path) -> None:
        own = self._session.pool_unchecked
        if not pool and (own is None or own.state == "stopped"):
            recording = self.recording(pool)
            if recording is None:
                raise InvalidRequestError("there are no ranks whose timeline could be saved")
            from hvdlab.collectives.tracing.trace_file import save_recording

            save_recording(recording, path)
            return
        from hvdlab.kernel_ext.notebook.trace_file import save_trace

        save_trace(own.client if own is not None and not pool else self._client(pool), path)


def load_panel(session: NotebookPool) -> PanelComms | None:
    """Return the comms of this kernel; ``None`` in a shell that is no kernel."""
    if getattr(session.shell, "kernel", None) is None:
        return None
    return PanelComms(session)

"""Comms of ranks (widgets are made of them) in the notebook's kernel, and the states of their widgets for a page that opens later.

For each comm that a rank opens there is one of the same id in the notebook's kernel, so that the frontend takes it for
one of the kernel's own. A page asks the kernel for the states of all widgets, over a comm that only ipywidgets in the kernel
itself serves. All messages about a widget pass through the kernel, which therefore knows its state without asking a rank.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.kernel_ext.notebook.output.merge import label
from hvdlab.kernel_ext.notebook.output_channels import FixedCellChannel
from hvdlab.kernel_ext.wire.channel import COMM, CommMessage, as_bytes, decode_comm, encode_comm

WIDGET, CONTROL = "jupyter.widget", "jupyter.widget.control"
"""Targets of comms, as the page knows them."""

_UPDATES = ("update", "echo_update")
Path = tuple[str | int, ...]
OnOpen = Callable[[Any, dict[str, Any]], None]


@dataclass(slots=True)
class _Widget:
    state: dict[str, Any] = field(default_factory=dict)
    buffers: dict[Path, bytes] = field(default_factory=dict)

    def update(self, data: dict[str, Any], buffers: Sequence[bytes]) -> None:
        state = data.get("state") or {}
        self.state = {**self.state, **state}  # a new one: a reader may still have the one before
        paths = [tuple(path) for path in data.get("buffer_paths") or ()]
        # A key that comes again replaces all its buffers, also those at paths that the new value lacks.
        said = {*state, *(path[0] for path in paths)}
        self.buffers = {path: one for path, one in self.buffers.items() if path[0] not in said}
        self.buffers.update(zip(paths, buffers, strict=False))


class WidgetStates:
    """States of the widgets of one notebook's ranks. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._widgets: dict[str, _Widget] = {}
        self._served = False

    def opened(self, comm: str, target: str, data: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """Keep the state of a comm that a rank has opened, if it is a widget's."""
        if target != WIDGET:
            return
        with self._lock:
            self._widgets[comm] = _Widget()
            self._widgets[comm].update(data, buffers)
            first, self._served = not self._served, True
        if first:  # importing ipywidgets takes a while, and mail of ranks does not wait
            threading.Thread(target=self._serve, name="hvdlab-widgets", daemon=True).start()

    def message_passed(self, comm: str, data: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """Update a widget's state by a message between a rank and the page."""
        if data.get("method") in _UPDATES:
            with self._lock:
                if (widget := self._widgets.get(comm)) is not None:
                    widget.update(data, buffers)

    def closed(self, comm: str) -> None:
        """Forget the widget of a comm that is closed."""
        with self._lock:
            self._widgets.pop(comm, None)

    def clear(self) -> None:
        """Forget all widgets: the ranks are gone."""
        with self._lock:
            self._widgets.clear()

    def add_to(
        self, states: dict[str, Any], paths: list[list[str | int]], buffers: list[Any]
    ) -> tuple[dict[str, Any], list[list[str | int]], list[Any]]:
        """Return the same with the ranks' widgets added: states by comm, the paths of the buffers in them, and the buffers."""
        with self._lock:
            found = {comm: (one.state, one.buffers) for comm, one in self._widgets.items()}
        states, paths, buffers = dict(states), list(paths), list(buffers)
        for comm, (state, parts) in found.items():
            states[comm] = {
                "model_name": state.get("_model_name"),
                "model_module": state.get("_model_module"),
                "model_module_version": state.get("_model_module_version"),
                "state": state,
            }
            paths += [[comm, "state", *path] for path in parts]
            buffers += parts.values()
        return states, paths, buffers

    def _serve(self) -> None:
        """Put a handler before the one that answers the page now; ipywidgets would replace it if it was imported later."""
        import comm

        if find_spec("ipywidgets") is not None:
            import ipywidgets  # type: ignore[import-untyped]  # it ships no types  # noqa: F401
        manager = comm.get_comm_manager()
        theirs: OnOpen = manager.targets.get(CONTROL, _alone)
        manager.register_target(CONTROL, lambda opened, message: theirs(_Control(opened, self), message))


class _Control:
    """Comm of the page, for the handler of the kernel's own widgets; it adds the ranks' widgets to the handler's answers."""

    def __init__(self, inner: Any, states: WidgetStates) -> None:
        self._inner, self._states = inner, states
        self.on_msg, self.on_close = inner.on_msg, inner.on_close

    def send(self, data: dict[str, Any], metadata: Any = None, buffers: Any = None) -> None:
        if data.get("method") == "update_states":
            states, paths, buffers = self._states.add_to(
                data.get("states") or {}, data.get("buffer_paths") or [], buffers or []
            )
            data = {**data, "states": states, "buffer_paths": paths}
        self._inner.send(data, metadata, buffers)


def _alone(comm: Any, message: dict[str, Any]) -> None:
    """Answer the page that there are no widgets, in a kernel that has none of its own."""

    def asked(question: dict[str, Any]) -> None:
        if question["content"]["data"].get("method") == "request_states":
            comm.send({"method": "update_states", "states": {}, "buffer_paths": []})

    comm.on_msg(asked)


KEPT_MESSAGES = 10_000
"""Messages of the page that wait for a coordinator. Beyond that the oldest ones go: a slider's newest position counts."""


class CommRelay:
    """Relay between comms of a pool's ranks and comms of the page. Lives as long as the pool's connection.

    Args:
        client: That connection.
        shell: The notebook's shell. Text that a comm's callbacks print is shown in the cell that runs when the rank opens it.
        states: Gets all messages that pass.
    """

    def __init__(self, client: Client, shell: InteractiveShell, states: WidgetStates) -> None:
        self._client, self._shell, self._states = client, shell, states
        self._lock = threading.Lock()
        self._comms: dict[str, tuple[Any, FixedCellChannel]] = {}
        #: Held while messages of the page are sent, so that all go out in order.
        self._posting = threading.Lock()
        #: Messages of the page that were not sent yet, each with its rank: there may be no coordinator.
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_MESSAGES)
        client.on_mail(COMM, self._from_rank)
        client.on_reconnected(lambda membership: self._post_kept())

    def _from_rank(self, rank: int, body: bytes) -> None:
        """Pass on a message of a rank. The client's thread."""
        message = decode_comm(body)
        if message.kind == "comm_open":
            self._open(rank, message)
            return
        with self._lock:
            comm, channel = self._comms.get(message.comm, (None, None))
        if comm is None or channel is None:
            return
        if message.kind == "output":
            for name, text in message.data.items():
                lines = str(text).splitlines(keepends=True)
                channel.stream(name, "".join(label((rank,)) + line for line in lines))
        elif message.kind == "comm_close":
            self._forget(message.comm)
            comm.close(message.data, message.metadata, list(message.buffers))
        else:
            self._states.message_passed(message.comm, message.data, message.buffers)
            comm.send(message.data, message.metadata, list(message.buffers))

    def _open(self, rank: int, message: CommMessage) -> None:
        from comm import create_comm

        # Not opened here, as a comm that is primary would be: the page can answer or close it as soon as it is open there.
        comm = create_comm(
            target_name=message.target,
            target_module=message.module,
            comm_id=message.comm,
            primary=False,
        )
        comm.on_msg(lambda content: self._to_rank(rank, "comm_msg", message.comm, content))
        comm.on_close(lambda content: self._to_rank(rank, "comm_close", message.comm, content))
        with self._lock:
            self._comms[message.comm] = comm, FixedCellChannel(self._shell)
        self._states.opened(message.comm, message.target, message.data, message.buffers)
        try:
            comm.open(message.data, message.metadata, list(message.buffers))
        except BaseException:
            self._forget(message.comm)
            raise

    def _to_rank(self, rank: int, kind: str, comm: str, content: dict[str, Any]) -> None:
        """Pass on a message of the frontend. The thread that takes the kernel's comm messages."""
        if kind == "comm_close":
            self._forget(comm)
        data = content["content"].get("data", {})
        message = CommMessage(kind, comm, data, content.get("metadata", {}), as_bytes(content.get("buffers")))
        self._states.message_passed(comm, data, message.buffers)
        with self._posting:
            self._kept.append((rank, encode_comm(message)))
        self._post_kept()

    def _post_kept(self) -> None:
        """Send the messages that wait, if there is a coordinator. Any thread."""
        with self._posting:
            while self._kept:
                rank, body = self._kept.popleft()
                try:
                    self._client.post(COMM, body, (rank,))
                except CoordinatorLostError:
                    # Under the lock: the call after the client has reconnected finds it, in front of the later ones.
                    self._kept.appendleft((rank, body))
                    return

    def _forget(self, comm: str) -> None:
        with self._lock:
            self._comms.pop(comm, None)
        self._states.closed(comm)

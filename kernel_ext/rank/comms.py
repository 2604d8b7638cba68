"""Comms in a rank: what widgets send goes to the notebook's frontend, and what the frontend answers comes back."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import comm
import ipykernel.ipkernel  # noqa: F401  # puts its own in the place of what is replaced here when it is imported
from comm.base_comm import BaseComm
from ipykernel.comm import CommManager

from hvdlab.kernel_ext.rank.display import wire_value
from hvdlab.kernel_ext.rank.widget_output import WidgetOutputs
from hvdlab.kernel_ext.wire.channel import COMM
from hvdlab.kernel_ext.wire.comms import CommMessage, as_bytes, encode

Post = Callable[[str, bytes], None]


class RankComms:
    """The comms of this process.

    Args:
        post: Sends mail to the pool.
        widgets: Installed with the first comm, as from then on there may be widgets that take output.
    """

    def __init__(self, post: Post, widgets: WidgetOutputs) -> None:
        self._post, self._widgets = post, widgets
        # ipykernel's class: ipyparallel's engine, which is a kernel of ipykernel's, takes no other.
        self._manager: Any = CommManager()  # type: ignore[no-untyped-call]  # it has no annotations
        self._before: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Let ``comm.create_comm``, and so ipywidgets, make comms whose other side is in the frontend."""
        self._before = comm.create_comm, comm.get_comm_manager
        comm.create_comm = self._create
        comm.get_comm_manager = lambda: self._manager

    def uninstall(self) -> None:
        """Put back what was there before."""
        self._widgets.uninstall()
        if self._before is not None:
            comm.create_comm, comm.get_comm_manager = self._before
            self._before = None

    def deliver(self, message: CommMessage) -> None:
        """The frontend sent this: call what the user or a widget has registered for it. Main thread."""
        content = {"comm_id": message.comm, "data": message.data}
        found = {"content": content, "metadata": message.metadata, "buffers": list(message.buffers)}
        if message.comm not in self._manager.comms:
            return
        out, err = _CallbackText("stdout", self._widgets), _CallbackText("stderr", self._widgets)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            getattr(self._manager, message.kind)(None, None, found)
        printed = {"stdout": out.getvalue(), "stderr": err.getvalue()}
        data = {name: wire_value(text) for name, text in printed.items() if text}
        if data:
            self._post(COMM, encode(CommMessage("output", message.comm, data, {}, ())))

    def _create(self, *args: Any, **kwargs: Any) -> BaseComm:
        self._widgets.install()
        return _RankComm(self._post, *args, **kwargs)


class _CallbackText(io.StringIO):
    """Text that a callback prints, but for that which an ``Output`` widget takes."""

    def __init__(self, name: str, widgets: WidgetOutputs) -> None:
        super().__init__()
        self._name, self._widgets = name, widgets

    def write(self, text: str, /) -> int:
        if isinstance(text, str) and self._widgets.entered and self._widgets.write(self._name, text):
            return len(text)
        return super().write(text)


class _RankComm(BaseComm):
    """A comm whose other side is in the notebook's frontend."""

    def __init__(self, post: Post, *args: Any, **kwargs: Any) -> None:
        self._post = post
        super().__init__(*args, **kwargs)

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Any = None,
        **keys: Any,
    ) -> None:
        """Send a message of this comm."""
        message = CommMessage(
            msg_type,
            self.comm_id,
            wire_value(data or {}),
            wire_value(metadata or {}),
            as_bytes(buffers),
            keys.get("target_name") or "",
            keys.get("target_module"),
        )
        self._post(COMM, encode(message))

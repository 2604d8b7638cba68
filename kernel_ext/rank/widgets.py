"""Widgets that live in a rank: their comms, whose other side is in the notebook's page, and ``with ipywidgets.Output():``.

In a kernel the page decides which output belongs to an ``Output`` widget, by the request that a message answers. Ranks answer
no request, so the rank itself puts the output into the widget, whose state goes to the page. It does so by thread: a progress bar
that draws itself on a thread of its own does not catch the cell's own output.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import comm
import ipykernel.ipkernel  # noqa: F401  # puts its own in the place of what is replaced here when it is imported
from comm.base_comm import BaseComm
from ipykernel.comm import CommManager

from hvdlab.collectives.engine.engine import Engine
from hvdlab.kernel_ext.wire.cells import Clear, Display
from hvdlab.kernel_ext.wire.channel import COMM, CommMessage, as_bytes, encode_comm
from hvdlab.kernel_ext.wire.codec import wire_value

INTERVAL = 0.05
"""Seconds between two states of a widget that are sent while code writes to it; leaving the ``with`` sends the last one."""
MOST_TEXT = 1 << 20
"""Characters of one text that are kept: each state is sent whole."""

_MODULE = "ipywidgets.widgets.widget_output"


class _Content:
    """Content of one widget.

    Attributes:
        outputs: The outputs, in the form in which the widget has them.
        clearing: Whether the next output takes the place of all these.
    """

    def __init__(self, widget: Any) -> None:
        self._widget = weakref.ref(widget)
        self._outputs: list[dict[str, Any]] = []
        self._clearing = self._changed = False
        self._sent_at = float("-inf")
        # Reentrant: an assignment to `outputs` calls the widget's observers, which may print into it.
        self._lock = threading.RLock()

    def write(self, name: str, text: str) -> None:
        with self._lock:
            self._begin()
            last = self._outputs[-1] if self._outputs else {}
            if last.get("output_type") == "stream" and last["name"] == name:
                text = last["text"] + text
                self._outputs.pop()
            self._outputs.append({"output_type": "stream", "name": name, "text": text[-MOST_TEXT:]})
            self._show()

    def show(self, display: Display) -> None:
        with self._lock:
            self._begin()
            self._outputs.append(
                {"output_type": "display_data", "data": display.data, "metadata": display.metadata}
            )
            self._show()

    def clear(self, wait: bool) -> None:
        with self._lock:
            self._clearing = True
            if not wait:
                self._begin()
                self.send()

    def send(self) -> None:
        with self._lock:
            widget = self._widget()
            if widget is not None and self._changed:
                # Before the assignment: text that its observers print is a change of its own.
                self._changed, self._sent_at = False, time.monotonic()
                widget.outputs = tuple(self._outputs)

    def _begin(self) -> None:
        """Take what the widget has from elsewhere (``append_stdout``), and leave out what was cleared."""
        widget = self._widget()
        if widget is not None and not self._changed:
            self._outputs = [dict(one) for one in widget.outputs]
        if self._clearing:
            self._outputs, self._clearing = [], False
        self._changed = True

    def _show(self) -> None:
        if time.monotonic() >= self._sent_at + INTERVAL:
            self.send()


class WidgetOutputs:
    """The widgets that take output, by thread.

    Attributes:
        entered: How many ``with`` statements are being executed, on all threads. While there are none, asking a thread
            for its own would be the largest part of a short write.
    """

    def __init__(self) -> None:
        self.entered = 0
        self._lock = threading.Lock()  # guards ``entered``
        self._entered = threading.local()
        self._contents: weakref.WeakKeyDictionary[Any, _Content] = weakref.WeakKeyDictionary()
        self._undo: Callable[[], None] | None = None

    def write(self, name: str, text: str) -> bool:
        """Return whether a widget has taken the text."""
        content = self._current()
        if content is not None:
            content.write(name, text)
        return content is not None

    def put(self, chunk: Display | Clear) -> bool:
        """Return whether a widget has taken it; none takes an update of a display, which may be shown elsewhere."""
        content = self._current()
        if content is None or (isinstance(chunk, Display) and chunk.update):
            return False
        if isinstance(chunk, Clear):
            content.clear(chunk.wait)
        else:
            content.show(chunk)
        return True

    def _current(self) -> _Content | None:
        stack: list[_Content] | None = getattr(self._entered, "stack", None)
        return stack[-1] if stack else None

    def install(self) -> None:
        """Have ``with`` statements of ipywidgets' ``Output`` call this; nothing is done before its import. Idempotent."""
        module = sys.modules.get(_MODULE)
        if module is None or self._undo is not None:
            return
        kind: Any = module.Output
        before = kind.__enter__, kind.__exit__
        kind.__enter__ = lambda widget: self._enter(widget)
        kind.__exit__ = lambda widget, *error: self._exit(*error)

        def undo() -> None:
            kind.__enter__, kind.__exit__ = before

        self._undo = undo

    def uninstall(self) -> None:
        """Put back what was there."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _enter(self, widget: Any) -> None:
        content = self._contents.get(widget)
        if content is None:
            content = self._contents[widget] = _Content(widget)
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        with (
            self._lock
        ):  # first: if an interrupt comes before the append, the number is too large, which only costs time
            self.entered += 1
        self._entered.stack.append(content)

    def _exit(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """As in a notebook, an error is shown in the widget and goes no further; but an interrupt ends the cell."""
        content: _Content = self._entered.stack[-1]
        try:
            if isinstance(error, Exception):
                from IPython.core.getipython import get_ipython

                shell = get_ipython()
                assert shell is not None
                shell.showtraceback((kind, error, trace), tb_offset=0)
        finally:
            self._entered.stack.pop()
            with self._lock:
                self.entered -= 1
            content.send()
        return isinstance(error, Exception)


class RankComms:
    """The comms of this process.

    Args:
        engine: Sends mail to the pool.
        widgets: Installed with the first comm, as from then on there may be widgets that take output.
    """

    def __init__(self, engine: Engine, widgets: WidgetOutputs) -> None:
        self._engine, self._widgets = engine, widgets
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
        """Call the callbacks that the user or a widget has registered for a message of the frontend. Main thread."""
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
            self._engine.post(COMM, encode_comm(CommMessage("output", message.comm, data, {}, ())))

    def _create(self, *args: Any, **kwargs: Any) -> BaseComm:
        self._widgets.install()
        return _RankComm(self._engine, *args, **kwargs)


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

    def __init__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        self._engine = engine
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
        self._engine.post(COMM, encode_comm(message))

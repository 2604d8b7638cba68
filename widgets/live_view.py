"""Base of the live views: a widget, the still picture that stays in its place, and messages to the page that belong to no cell."""

from __future__ import annotations

import contextvars
import html
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anywidget
import traitlets
from IPython.display import display

from hvdlab.collectives.failures import Failure, Failures, as_messages
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.recording_feed import RecordingFeed

STATIC = Path(__file__).parent / "static"
T = TypeVar("T")

Data = dict[str, Any]
Publish = Callable[[Data, Data, str, bool], None]


class RecordingView(anywidget.AnyWidget):
    """Base of the views of a recording.

    Args:
        recording: The recording to show.
        traits: Values of the widget's traits.

    Attributes:
        recording: The recording that is shown.
        failures: Errors of the view, which it shows itself.
    """

    _title: ClassVar[str]
    _css = (STATIC / "views.css").read_text(encoding="utf-8")
    still = traitlets.Unicode("").tag(sync=True)

    def __init__(self, recording: Recording, **traits: Any) -> None:
        # Before the widget is made, whose comm opens with the first values of its traits, `still` among them.
        self.recording = recording
        self.failures = Failures(recording.failures)
        self._output = LiveOutput(self._title.lower(), self)
        unparented(super().__init__, still=self._output.name, **traits)

    @abstractmethod
    def _still_html(self) -> str:
        """Return the still picture, an element with the class ``self._output.name``."""

    @abstractmethod
    def _still_text(self) -> str:
        """Return the still picture for a terminal."""

    @abstractmethod
    def _handle(self, content: Mapping[str, Any]) -> None:
        """Act on a message of the page. Main thread, or that of the page's subshell."""

    def still_picture(self) -> Data:
        """Return the picture that stays, as data by media type; its element has the output's name as a CSS class."""
        return {"text/html": self._still_html(), "text/plain": self._still_text()}

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        with self.failures.guard("what the page asked for"):
            if isinstance(content, dict):
                self._handle(content)

    def _send_to_page(self, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        """Send a message to the page. Any thread."""
        if self.comm is not None:
            unparented(self.send, message, buffers)

    def _ipython_display_(self) -> None:
        self._output.show(self._repr_mimebundle_())

    def __repr__(self) -> str:
        with self.failures.guard("the still picture"):
            return self._still_text()
        return self._title + text_of(self.failures.all())


class FeedView(RecordingView):
    """Base of the views whose page gets rows or points from a feed of its own."""

    def _start_feed(self, *, rows: bool = True) -> None:
        """Listen to the page, then begin to send: the feed repeats itself until the page has answered."""
        self._rows = rows
        self.on_msg(self._receive)
        self._feed = RecordingFeed(
            self.recording, self._send_to_page, self._output, rows=rows, failures=self.failures
        )

    def _handle(self, content: Mapping[str, Any]) -> None:
        if content.get("type") == "hello":
            since, points = (max(0, int(content.get(name, 0))) for name in ("since", "points"))
            self._feed.view_ready(since, rows=self._rows, points=points)

    def close(self) -> None:
        """End the view; the still picture remains."""
        self._feed.close()
        super().close()


class TableView(RecordingView):
    """Base of the views that a thread of their own keeps up to date, by traits."""

    failed: traitlets.List[dict[str, str]] = traitlets.List().tag(sync=True)

    def __init__(self, recording: Recording, **traits: Any) -> None:
        self._closing = threading.Event()
        #: Whether a page was loaded again, or was away, and has old traits and an old picture: it missed the updates.
        self._reopened = False
        #: Held while the thread decides to end, and while a page finds out whether it has ended.
        self._ending = threading.Lock()
        #: Whether the thread still draws. A thread that has decided to end is alive for a moment longer.
        self._serving = True
        super().__init__(recording, **traits)

    @abstractmethod
    def _update(self) -> None:
        """Bring the traits up to date."""

    @abstractmethod
    def _run(self) -> None:
        """Update the view until it is closed, or the recording and with it all news has ended. The view's thread."""

    def _start_thread(self) -> None:
        """Listen to the page, and keep the view up to date from now on."""
        self.on_msg(self._receive)
        self._update()
        name = f"hvdlab-{self._title.lower()}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._run()
        finally:
            while self._serves_on():
                self._show_again()

    def _serves_on(self) -> bool:
        """Return whether a page waits for a new picture; if not, the thread draws no more."""
        with self._ending:
            # A page that said hello after the last update has found the thread serving, and has drawn nothing itself.
            self._serving = self._reopened and not self._closing.is_set()
            self._reopened = False
            return self._serving

    def _wanted(self) -> bool:
        return self._closing.is_set() or self._reopened

    def _show_again(self) -> None:
        """Send a page that was loaded again, or was away, all that it shows, and a new picture.

        Called on the view's thread as long as that serves: on another one, older traits could come after newer ones.
        """
        with self.failures.guard("the view's update"):
            # Not the script and the styles, whose names begin so: they are large, and never change.
            unparented(self.send_state, [name for name in self.keys if not name.startswith("_")])
        self._draw_still()

    def _draw_still(self) -> None:
        with self.failures.guard("the still picture"):
            self._output.refresh()

    def _show_failures(self) -> None:
        """Send the view's errors to the page, if there are others than before."""
        failed = as_messages(self.failures.all())
        if failed != self.failed:
            unparented(setattr, self, "failed", failed)

    def _handle(self, content: Mapping[str, Any]) -> None:
        if content.get("type") == "hello":
            # Before the wake-up, upon which the view's thread reads it.
            self._reopened = True
            self.recording.wake_waiters()
            with self._ending:
                ended = not self._serving
            if ended:
                self._show_again()

    def close(self) -> None:
        """End the view; the still table remains."""
        self._closing.set()
        self.recording.wake_waiters()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        super().close()


class LiveOutput:
    """Output of one view in two parts: a picture that stays in the notebook, and the widget, which hides it while it lives.

    Args:
        kind: Kind of view, for the name.
        view: The view; it draws the picture, which shows the view's errors, too.

    Attributes:
        name: Name of this output, also a CSS class.
        publish: ``publish(data, metadata, area, update)`` shows data in an area (if it has a name), or updates that area; by
            default under the cell that runs.
    """

    def __init__(self, kind: str, view: RecordingView) -> None:
        self.name = f"hvdlab-{kind}-{uuid.uuid4().hex[:12]}"
        self.publish: Publish = _under_running_cell
        self._view, self._failures = view, view.failures
        self._shown = False

    def _still(self) -> Data:
        data: Data = {"text/html": f'<div class="hvd-still {self.name}"></div>', "text/plain": ""}
        with self._failures.guard("the still picture"):
            data = self._view.still_picture()
        found = self._failures.all()
        return data | {
            "text/html": data["text/html"].removesuffix("</div>") + html_of(found) + "</div>",
            "text/plain": data["text/plain"] + text_of(found),
        }

    def show(self, bundle: Any) -> None:
        """Show both parts; ``bundle`` is the result of the widget's ``_repr_mimebundle_``."""
        # Two outputs: with both in one bundle JupyterLab would show the widget also where no kernel has it.
        self.publish(self._still(), {}, self.name, False)
        self._shown = True
        if bundle is not None:
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            self.publish({**data, "text/plain": ""}, {}, "", False)

    def refresh(self) -> None:
        """Put the present picture in the place of the last one, if that was ever shown."""
        if self._shown:
            self.publish(self._still(), {}, self.name, True)


def text_of(failures: tuple[Failure, ...]) -> str:
    """Return the failures as lines under a view's text; empty if there are none."""
    return "".join(f"\n{failure}" for failure in failures)


def html_of(failures: tuple[Failure, ...]) -> str:
    """Return the failures for the end of a view's picture; empty if there are none."""
    lines = "".join(
        f"<details><summary>{html.escape(str(one))}</summary><pre>{html.escape(one.trace)}</pre></details>"
        for one in failures
    )
    return f'<div class="hvd-failures">{lines}</div>' if lines else ""


def _under_running_cell(data: Data, metadata: Data, area: str, update: bool) -> None:
    where: dict[str, Any] = {"display_id": area, "update": update} if area else {}
    display(data, raw=True, metadata=metadata, **where)


def unparented(call: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Call a function that sends messages of a widget, so that the messages belong to no cell.

    A kernel with subshells handles messages of the browser on the subshell that the page has chosen, also while a cell
    runs. But if a widget's last message was part of a cell, the page sends its answers to the main shell, where they wait
    until the cell has ended. Output that the call makes must not rely on the cell either. In a kernel without subshells,
    and without a kernel, this is a plain call.
    """
    parent = _parent_variable()
    if parent is None:
        return call(*arguments, **more)

    def run() -> T:
        parent.set({})
        return call(*arguments, **more)

    # In a copy: the caller's own output still belongs to its cell.
    return contextvars.copy_context().run(run)


def _parent_variable() -> contextvars.ContextVar[Any] | None:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    found = getattr(getattr(shell, "kernel", None), "_shell_parent", None)
    return found if isinstance(found, contextvars.ContextVar) else None

"""The coming and going of ranks as a widget, with buttons that change which ranks there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from hvdlab.collectives.failures import Failures, as_messages
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.membership_actions import ChangeablePool, MembershipActions
from hvdlab.widgets.membership_news import MembershipNews
from hvdlab.widgets.membership_rows import membership_html, membership_text
from hvdlab.widgets.output import Output, text_of
from hvdlab.widgets.rank_rows import HEARTBEAT, cell_runs
from hvdlab.widgets.timeline import STATIC
from hvdlab.widgets.unparented import unparented

INTERVAL = 0.3
"""Seconds between two questions to the pool."""
STILL = 20
"""Changes that a saved notebook keeps."""


class MembershipWidget(anywidget.AnyWidget):
    """Which ranks there are, since when and from where, live. Made by :func:`hvdlab.widgets.views.membership`.

    Attributes:
        recording: Wakes the widget's thread when something has changed.
        failures: Errors of the widget, which it shows itself.
    """

    _esm = (STATIC / "membership.js").read_text(encoding="utf-8")
    _css = (STATIC / "views.css").read_text(encoding="utf-8")
    membership: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    failed: traitlets.List[dict[str, str]] = traitlets.List().tag(sync=True)
    still = traitlets.Unicode("").tag(sync=True)

    def __init__(self, recording: Recording, find: Callable[[], ChangeablePool | None]) -> None:
        self.recording = recording
        self.failures = Failures(recording.failures)
        self._find = find
        self._news: MembershipNews | None = None
        self._actions: MembershipActions | None = None
        self._output = Output("membership", self._still, self.failures)
        self._closing = threading.Event()
        self._drawn: object = None
        #: Whether a page was loaded again, whose picture is old: updates of it went to the page before.
        self._reopened = False
        unparented(super().__init__, still=self._output.name)
        self.on_msg(self._receive)
        self._update()
        self._thread = threading.Thread(target=self._run, name="hvdlab-membership", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        version, soon, sent = -1, False, 0.0
        # The pool may end just after a question to it, so ask until no further question is due.
        while not self._closing.is_set() and (
            soon or not self.recording.closed or version != self.recording.version
        ):
            patience = INTERVAL if soon else HEARTBEAT if cell_runs(self.recording) else None
            self.recording.wait(version, self._wanted, patience)
            version = self.recording.version
            self._update()
            soon = self._news is not None and self._news.asks_later
            if self._drawn is not self.membership or self._reopened:
                self._drawn, self._reopened = self.membership, False
                with self.failures.guard("the still picture"):
                    self._output.refresh()
            if time.monotonic() >= sent + HEARTBEAT:
                sent = time.monotonic()
                self._say_alive()
            self._closing.wait(INTERVAL)
        if self._news is not None:
            self._news.close()

    def _wanted(self) -> bool:
        return self._closing.is_set() or self._reopened

    def _say_alive(self) -> None:
        """Let the page know that the kernel lives, and whether it hears that again within ``HEARTBEAT``."""
        with self.failures.guard("which ranks there are"):
            if self.comm is not None:
                unparented(self.send, {"type": "alive", "runs": cell_runs(self.recording)})

    def _update(self) -> None:
        with self.failures.guard("which ranks there are"):
            if self._news is None and (pool := self._find()) is not None:
                self._actions = MembershipActions(pool, self.recording.notify)
                self._news = MembershipNews(pool, self._actions, self.recording)
            if self._news is not None and (news := self._news.take()) is not None:
                unparented(setattr, self, "membership", news)
        failed = as_messages(self.failures.all())
        if failed != self.failed:
            unparented(setattr, self, "failed", failed)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        with self.failures.guard("what the page asked for"):
            if isinstance(content, dict) and content.get("type") == "hello":
                self._reopened = True
                self.recording.wake_waiters()
                if not self._thread.is_alive():
                    self._output.refresh()
            if not isinstance(content, dict) or content.get("type") != "do":
                return
            request = content.get("request")
            if self._actions is None:
                self._answer(request, {"error": "there are no ranks yet"})
                return
            try:
                self._actions.start(content, lambda reply: self._answer(request, reply))
            except Exception as error:
                self._answer(request, {"error": str(error) or type(error).__name__})
                raise

    def _answer(self, request: object, reply: dict[str, Any]) -> None:
        if self.comm is not None:
            unparented(self.send, {"type": "answer", "request": request} | reply)

    def _still(self) -> dict[str, Any]:
        state = self._news.state if self._news is not None else None
        text = "Ranks: waiting for ranks" if state is None else membership_text(state, STILL)
        page = "" if state is None else membership_html(state, STILL)
        return {"text/html": f'<div class="hvd-still {self._output.name}">{page}</div>', "text/plain": text}

    def _ipython_display_(self) -> None:
        self._output.show(self._repr_mimebundle_())

    def close(self) -> None:
        """End the widget; the still tables remain."""
        self._closing.set()
        self.recording.wake_waiters()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        super().close()

    def __repr__(self) -> str:
        with self.failures.guard("the still picture"):
            return str(self._still()["text/plain"])
        return "Membership" + text_of(self.failures.all())

"""Feed of the panel in JupyterLab: rows and news of a pool, for as long as a page asks for them.

A page says what it wants and repeats that every now and then; one that falls silent gets nothing any more, since a page that
is closed does not say goodbye. Everything goes out over one comm and comes in over another.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.membership_actions import ChangeablePool, MembershipActions
from hvdlab.widgets.membership_news import MembershipNews
from hvdlab.widgets.publisher import Publisher

Send = Callable[[dict[str, Any], list[bytes]], None]
Content = Mapping[str, Any]
Has = tuple[int, int]  # the rows and the points before these numbers

OWN = ""
"""The pool of the notebook, whichever that is."""
LEASE = 75.0
"""Seconds for which a page's wish holds. A page repeats it every 20 s; browsers let hidden pages do so once a minute."""
LONG_LEASE = 3600.0
"""The same where a page can't be heard while a cell runs."""


class Desk(Protocol):
    """Requests of a panel to its notebook. Any thread; raises ``HvdlabError`` or ``OSError`` with a sentence for users."""

    def recording(self, pool: str) -> Recording | None:
        """The recording of a pool; ``None`` if there are no ranks now."""
        ...

    def changeable(self, pool: str) -> ChangeablePool | None:
        """The pool itself; ``None`` if it can only be watched."""
        ...

    def pools(self) -> list[dict[str, Any]]:
        """All pools that can be shown."""
        ...

    def do(self, what: str, content: Content) -> dict[str, Any]:
        """Anything else, such as saving; returns the answer."""
        ...


@dataclass
class Showing:
    """A pool that is sent to pages.

    Attributes:
        recording: The pool's recording.
        name: The recording's name, by which a page says which one it knows.
        until: When the pages' wish for the pool ends, by ``time.monotonic()``.
        rows_until: When the wish for rows ends; without it pages only get news of the ranks.
        actions: The actions that change the pool's ranks; ``None`` if it can only be watched.
        ended: Whether the wish has ended, and the publisher with it.
    """

    recording: Recording
    name: str
    until: float = 0.0
    rows_until: float = 0.0
    actions: MembershipActions | None = None
    publisher: Publisher = field(init=False)
    ended: bool = False


class Panel:
    """Serves all pages that show one notebook.

    Args:
        send: Sends a message to every page; called on any thread.
        desk: The notebook.
        lease: Seconds for which a wish holds.
    """

    def __init__(self, send: Send, desk: Desk, *, lease: float = LEASE) -> None:
        self._send, self._desk, self._lease = send, desk, lease
        self._names: weakref.WeakKeyDictionary[Recording, str] = weakref.WeakKeyDictionary()
        self._changing = threading.Lock()
        self._showings: dict[str, Showing] = {}
        self._wanted: dict[str, tuple[float, float]] = {}  # until when the pool, and until when its rows
        self._closed = False
        self._failures = Failures()

    def receive(self, content: Content, *, lease: float | None = None) -> None:
        """Take a message of a page. ``lease`` is how many seconds its wish holds. Any thread."""
        kind, request = content.get("type"), content.get("request")
        try:
            if kind == "hello":
                self._hello(content, lease or self._lease)
            elif kind == "pools":
                self._answer(request, {"pools": self._desk.pools()})
            elif kind == "change":
                self._change(content)
            elif isinstance(kind, str):
                self._answer(request, self._desk.do(kind, content))
            elif request is not None:
                raise InvalidRequestError(f"the notebook knows no request of the type {kind!r}.")
        except Exception as error:  # noqa: BLE001  (the page says it; ipykernel would write it under a cell)
            self._failures.add("what the page asked for", error)
            if kind == "hello":
                text = str(error) or type(error).__name__
                self._send({"type": "nothing", "pool": content.get("pool", OWN), "text": text}, [])
            else:
                self._answer(request, {"error": str(error) or type(error).__name__})

    def pool_changed(self) -> None:
        """The notebook has another pool now, or none. Any thread."""
        until, rows_until = self._wanted.get(OWN, (0.0, 0.0))
        if until <= time.monotonic():
            return
        with self._failures.guard("the ranks of the new pool"):
            self._show(OWN, None, None, until, rows_until)
            return
        self._send({"type": "nothing", "pool": OWN, "text": str(self._failures.all()[-1])}, [])

    def close(self) -> None:
        """End all threads. Idempotent."""
        with self._changing:
            self._closed = True
            showings, self._showings = list(self._showings.values()), {}
        for showing in showings:
            showing.publisher.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _answer(self, request: Any, answer: dict[str, Any]) -> None:
        self._send({"type": "answer", "request": request} | answer, [])

    def _change(self, content: Content) -> None:
        """Do what the buttons of a membership view ask for."""
        showing = self._showings.get(str(content.get("pool", OWN)))
        if showing is None or showing.actions is None:
            raise InvalidRequestError("these ranks can only be changed where they were started.")
        request = content.get("request")
        showing.actions.start(content, lambda reply: self._answer(request, reply))

    def _hello(self, content: Content, lease: float) -> None:
        pool = str(content.get("pool", OWN))
        until = time.monotonic() + lease
        before = self._wanted.get(pool, (0.0, 0.0))[1]
        rows_until = until if content.get("rows") else before
        self._wanted[pool] = until, rows_until
        since = content.get("since")
        has = (max(0, since), max(0, int(content.get("points", 0)))) if isinstance(since, int) else None
        self._show(pool, content.get("recording"), has, until, rows_until)

    def _show(self, pool: str, known: object, has: Has | None, until: float, rows_until: float) -> None:
        """Send a pool to a page that has these rows and points of the recording that it knows.

        A page that does not say what it has only wants to go on getting what it gets.
        """
        recording = self._desk.recording(pool)
        if recording is None:
            self._send({"type": "nothing", "pool": pool}, [])
            return
        old = self._showings.get(pool)
        if old is not None and not old.ended and old.recording is recording:
            old.until, old.rows_until = until, rows_until
            if has is not None or known != old.name:
                self._greet(old, known, has)
            return
        showing = self._make(pool, recording, until, rows_until)
        if showing is None:
            return
        if old is not None:
            old.publisher.close()
        self._greet(showing, known, has)

    def _make(self, pool: str, recording: Recording, until: float, rows_until: float) -> Showing | None:
        changeable, membership = self._desk.changeable(pool), None
        with self._changing:
            if self._closed:
                return None
            name = self._names.setdefault(recording, uuid.uuid4().hex)
            showing = Showing(recording, name, until, rows_until)
            if changeable is not None:
                showing.actions = MembershipActions(changeable, recording.notify)
                membership = MembershipNews(changeable, showing.actions, recording)
            showing.publisher = Publisher(
                recording,
                lambda message, buffers: self._pass_on(pool, showing, message, buffers),
                lambda: None,
                rows=False,
                points=False,
                membership=membership,
            )
            self._showings[pool] = showing
        return showing

    def _greet(self, showing: Showing, known: object, has: Has | None) -> None:
        row, point = has if has is not None and known == showing.name else (0, 0)
        rows = showing.rows_until > time.monotonic()
        showing.publisher.want(rows=rows, points=rows)
        showing.publisher.hello(row, rows=rows, points=point)

    def _pass_on(self, pool: str, showing: Showing, message: dict[str, Any], buffers: list[bytes]) -> None:
        now = time.monotonic()
        if now > showing.until:
            showing.ended = True
            showing.publisher.close()  # this is the publisher's own thread, which ends then
            return
        if message["count"] and now > showing.rows_until:
            showing.publisher.want(rows=False, points=False)
        self._send(message | {"pool": pool, "recording": showing.name}, buffers)

"""Feed of the panel in JupyterLab: rows and news of a pool, for as long as a page asks for them.

A page subscribes for a limited time, and renews that; a page that falls silent gets no further message, since a page that is
closed sends nothing. All messages go out over one comm and come in over another.
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
from hvdlab.widgets.pool_membership import ChangeablePool, MembershipActions, MembershipNews
from hvdlab.widgets.recording_feed import RecordingFeed, cell_runs

Send = Callable[[dict[str, Any], list[bytes]], None]
Content = Mapping[str, Any]
Has = tuple[int, int]  # the rows and the points before these numbers

OWN = ""
"""Id of the notebook's own pool."""
LEASE = 75.0
"""Seconds for which a page's subscription holds. A page renews it every 20 s; browsers let hidden pages do so once a minute."""
LONG_LEASE = 3600.0
"""Seconds of one where no message of a page arrives while a cell runs. While ranks run one, it holds for longer."""


class PanelBackend(Protocol):
    """Requests of a panel to its notebook. Any thread; raises ``HvdlabError`` or ``OSError`` with a sentence for users."""

    def recording(self, pool: str) -> Recording | None:
        """Return the recording of a pool; ``None`` if there are no ranks now."""
        ...

    def changeable(self, pool: str) -> ChangeablePool | None:
        """Return the pool itself; ``None`` if it can only be watched."""
        ...

    def pools(self) -> list[dict[str, Any]]:
        """Return all pools that can be shown."""
        ...

    def run_command(self, what: str, content: Content) -> dict[str, Any]:
        """Carry out another request, such as saving, and return the answer."""
        ...


@dataclass
class ShownPool:
    """Pool that is sent to pages.

    Attributes:
        recording: The pool's recording.
        name: Id of the recording, with which a page names the one that it has.
        until: When the pages' subscription of the pool ends, by ``time.monotonic()``.
        rows_until: When their subscription of rows ends; without it pages only get news of the ranks.
        actions: The actions that change the pool's ranks; ``None`` if it can only be watched.
        ended: Whether the subscription has ended, and the publisher with it.
    """

    recording: Recording
    name: str
    until: float = 0.0
    rows_until: float = 0.0
    actions: MembershipActions | None = None
    publisher: RecordingFeed = field(init=False)
    ended: bool = False


class Panel:
    """Server of all pages that show one notebook.

    Args:
        send: Sends a message to every page; called on any thread.
        backend: The notebook.
        lease: Seconds for which a subscription holds.
    """

    def __init__(self, send: Send, backend: PanelBackend, *, lease: float = LEASE) -> None:
        self._send, self._backend, self._lease = send, backend, lease
        #: Recording to its id, which stays as it is when the feed ends: a page that comes back gets the
        #: rows that it lacks.
        self._names: weakref.WeakKeyDictionary[Recording, str] = weakref.WeakKeyDictionary()
        self._changing = threading.Lock()
        self._shown: dict[str, ShownPool] = {}
        self._wanted: dict[str, tuple[float, float]] = {}  # until when the pool, and until when its rows
        #: Pools whose pages can renew their subscription only when the running cell has ended.
        self._waiting: set[str] = set()
        self._closed = False
        self._failures = Failures()

    def receive(self, content: Content, *, lease: float | None = None) -> None:
        """Act on a message of a page, whose subscription holds for ``lease`` seconds. Any thread."""
        kind, request = content.get("type"), content.get("request")
        try:
            if kind == "hello":
                self._hello(content, lease or self._lease)
            elif kind == "pools":
                self._answer(request, {"pools": self._backend.pools()})
            elif kind == "change":
                self._change(content)
            elif isinstance(kind, str):
                self._answer(request, self._backend.run_command(kind, content))
            elif request is not None:
                raise InvalidRequestError(f"the notebook knows no request of the type {kind!r}.")
        except Exception as error:  # noqa: BLE001  (the page shows it; ipykernel would write it under a cell)
            self._failures.add("what the page asked for", error)
            if kind == "hello":
                text = str(error) or type(error).__name__
                self._send({"type": "nothing", "pool": content.get("pool", OWN), "text": text}, [])
            else:
                self._answer(request, {"error": str(error) or type(error).__name__})

    def pool_changed(self) -> None:
        """Send the notebook's new pool, if it has another one or none now. Any thread."""
        until, rows_until = self._wanted.get(OWN, (0.0, 0.0))
        if until <= time.monotonic():
            self._forget_own()
            return
        shown = self._shown.get(OWN)
        # By its name, for the pages have it already: a pool that was stopped leaves its recording, which is not to be sent again.
        known = shown.name if shown is not None else None
        with self._failures.guard("the ranks of the new pool"):
            self._show(OWN, known, None, until, rows_until)
            return
        self._send({"type": "nothing", "pool": OWN, "text": str(self._failures.all()[-1])}, [])

    def close(self) -> None:
        """End all threads. Idempotent."""
        with self._changing:
            self._closed = True
            all_shown, self._shown = list(self._shown.values()), {}
        for shown in all_shown:
            shown.publisher.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _forget_own(self) -> None:
        """Forget the earlier pool, which no page shows: its recording takes memory."""
        with self._changing:
            shown = self._shown.get(OWN)
            # A page may just have renewed its subscription.
            if shown is None or shown.until > time.monotonic():
                return
            del self._shown[OWN]
        # Outside: the end of the feed's thread is waited for, and that thread may be about to take the lock.
        shown.publisher.close()

    def _forget_others(self, pool: str) -> None:
        """Forget pools that no page shows, except ``pool`` and the notebook's own: their recordings take memory."""
        now = time.monotonic()
        with self._changing:
            over = [
                name for name, shown in self._shown.items() if name not in (OWN, pool) and shown.until < now
            ]
            forgotten = [self._shown.pop(name) for name in over]
        # Outside: the end of a feed's thread is waited for, and that thread may be about to take the lock.
        for shown in forgotten:
            shown.publisher.close()

    def _answer(self, request: Any, answer: dict[str, Any]) -> None:
        self._send({"type": "answer", "request": request} | answer, [])

    def _change(self, content: Content) -> None:
        """Carry out the request of a membership view's button."""
        shown = self._shown.get(str(content.get("pool", OWN)))
        if shown is None or shown.actions is None:
            raise InvalidRequestError("these ranks can only be changed where they were started.")
        request = content.get("request")
        shown.actions.begin(content, lambda reply: self._answer(request, reply))

    def _hello(self, content: Content, lease: float) -> None:
        pool = str(content.get("pool", OWN))
        # Here, since a feed whose recording has ended sends no message that would find its subscription over.
        self._forget_others(pool)
        until = time.monotonic() + lease
        before = self._wanted.get(pool, (0.0, 0.0))[1]
        rows_until = until if content.get("rows") else before
        self._wanted[pool] = until, rows_until
        if lease >= LONG_LEASE:
            self._waiting.add(pool)
        else:
            self._waiting.discard(pool)
        since = content.get("since")
        has = (max(0, since), max(0, int(content.get("points", 0)))) if isinstance(since, int) else None
        self._show(pool, content.get("recording"), has, until, rows_until)

    def _show(self, pool: str, known: object, has: Has | None, until: float, rows_until: float) -> None:
        """Send a pool to a page that has these rows and points of the recording that it knows.

        A page that names nothing only renews its subscription.
        """
        recording = self._backend.recording(pool)
        if recording is None:
            self._send({"type": "nothing", "pool": pool}, [])
            return
        changeable = self._backend.changeable(pool)
        # Under the lock: pages say hello on several threads, and two feeds would send all of it twice.
        with self._changing:
            if self._closed:
                return
            old = self._shown.get(pool)
            if old is None or old.ended or old.recording is not recording:
                shown = self._make(pool, recording, changeable, until, rows_until)
            else:
                shown = old
                shown.until, shown.rows_until = until, rows_until
        # Outside: the end of a feed's thread is waited for, and that thread may be about to take the lock.
        if old is not None and old is not shown:
            old.publisher.close()
        if old is not shown or has is not None or known != shown.name:
            self._resume(shown, known, has)

    def _make(
        self,
        pool: str,
        recording: Recording,
        changeable: ChangeablePool | None,
        until: float,
        rows_until: float,
    ) -> ShownPool:
        """Return the pool with a feed of its own, which sends from now on. The caller holds the lock."""
        membership = None
        name = self._names.setdefault(recording, uuid.uuid4().hex)
        shown = ShownPool(recording, name, until, rows_until)
        if changeable is not None:
            shown.actions = MembershipActions(changeable, recording)
            membership = MembershipNews(changeable, shown.actions, recording)
        shown.publisher = RecordingFeed(
            recording,
            lambda message, buffers: self._forward(pool, shown, message, buffers),
            rows=False,
            points=False,
            membership=membership,
        )
        self._shown[pool] = shown
        return shown

    def _resume(self, shown: ShownPool, known: object, has: Has | None) -> None:
        row, point = has if has is not None and known == shown.name else (0, 0)
        rows = shown.rows_until > time.monotonic()
        shown.publisher.set_wanted(rows=rows, points=rows)
        shown.publisher.view_ready(row, rows=rows, points=point)

    def _forward(self, pool: str, shown: ShownPool, message: dict[str, Any], buffers: list[bytes]) -> None:
        now = time.monotonic()
        # A cell may run for hours, in which a page that is there can't say so; its hellos come when the cell has ended.
        waits = pool in self._waiting and cell_runs(shown.recording)
        with self._changing:
            # In one step with the look at the time: a page has either renewed the subscription, or gets another feed.
            shown.ended = now > shown.until and not waits
        if shown.ended:
            shown.publisher.close()  # this is the publisher's own thread, which ends then
            return
        if message["count"] and now > shown.rows_until and not waits:
            shown.publisher.set_wanted(rows=False, points=False)
        self._send(message | {"pool": pool, "recording": shown.name}, buffers)

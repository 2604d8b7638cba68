"""Membership of a pool, for views and ``%hvd_elastic``: its ranks and their history as tables, as messages, and actions that change it."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.collectives.text import format_ranks, visible
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import LEAVES

MEMBERS = ("rank", "host", "pid", "state", "since", "by")
HISTORY = ("time", "rank", "change", "why", "host", "pid")
SENT = 400
"""Changes that a browser gets, the newest."""
WIDEST = 300
"""Characters of a cell of a table."""

Rows = list[tuple[str, ...]]

STATES = {"ready": "here", "waits to be let in": "waiting", LEAVES: "leaving"}
"""The word by which browsers know a state."""


class RankChange(Protocol):
    """Change of a rank, or of all, whose number then is negative."""

    @property
    def rank(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def when(self) -> float: ...


class SizeBounds(Protocol):
    """Bounds of the number of an elastic cell's ranks."""

    @property
    def at_least(self) -> int: ...
    @property
    def at_most(self) -> int | None: ...


class MembershipState(Protocol):
    """State of a pool's ranks; :class:`hvdlab.kernel_ext.notebook.membership.ElasticState` describes each part."""

    @property
    def generation(self) -> int: ...
    @property
    def cells(self) -> Sequence[tuple[str, SizeBounds, tuple[int, ...]]]: ...
    @property
    def members(self) -> Mapping[int, str]: ...
    @property
    def awaited(self) -> tuple[int, ...]: ...
    @property
    def arrivals(self) -> Mapping[int, RankChange]: ...
    @property
    def history(self) -> Sequence[RankChange]: ...
    @property
    def newcomers(self) -> tuple[int, ...]: ...


def headline(state: MembershipState) -> str:
    """Return one sentence: how many ranks are there, the ranks that are missing, and the elastic cells that run."""
    leaving = [rank for rank, text in state.members.items() if text == LEAVES]
    wanted = len(state.members) - len(leaving)
    text = f"{wanted - len(state.awaited)} of {wanted} ranks are there"
    if leaving:
        text += f", {format_ranks(leaving)} {'leaves' if len(leaving) == 1 else 'leave'} at the next commit"
    if state.awaited:
        text += f", {format_ranks(state.awaited)} {'is' if len(state.awaited) == 1 else 'are'} awaited"
    for label, bounds, ranks in state.cells:
        most = f", at most {bounds.at_most}" if bounds.at_most is not None else ""
        text += f"; cell {label} trains on {format_ranks(ranks)}, at least {bounds.at_least}{most}"
    return text


def member_rows(state: MembershipState) -> Rows:
    """Return a row of texts for each rank, with the columns ``MEMBERS``."""
    found: Rows = []
    for rank, text in sorted(state.members.items()):
        came = state.arrivals.get(rank)
        host, pid, since, by = (
            (came.host, came.pid, clock(came.when), came.why) if came is not None else ("", 0, "", "")
        )
        found.append(_visible(str(rank), plain_host(host), str(pid or ""), text, since, by))
    return found


def history_rows(state: MembershipState, last: int) -> Rows:
    """Return a row of texts for each of the last changes, oldest first, with the columns ``HISTORY``."""
    return [
        _visible(
            clock(one.when),
            str(one.rank) if one.rank >= 0 else "all",
            "regrouped" if one.what == "formed" else one.what,
            one.why,
            plain_host(one.host),
            str(one.pid or ""),
        )
        for one in state.history[-last:]
    ]


def membership_text(state: MembershipState, last: int) -> str:
    """Return headline and tables for a terminal; ``last`` is the number of changes."""
    earlier = len(state.history) - last
    more = f"\n({earlier} earlier changes: --last N shows more)" if earlier > 0 else ""
    members, history = _text(MEMBERS, member_rows(state)), _text(HISTORY, history_rows(state, last))
    return f"{headline(state)}\n\n{members}\n\n{history}{more}"


def membership_html(state: MembershipState, last: int) -> str:
    """Return headline and tables for a notebook, the newest change first, as in the widget.

    Args:
        state: The ranks of a pool and their history.
        last: The number of changes.
    """
    members, history = _html(MEMBERS, member_rows(state)), _html(HISTORY, history_rows(state, last)[::-1])
    return f'<div class="hvd-output"><p>{html.escape(headline(state))}</p>{members}{history}</div>'


def membership_message(state: MembershipState) -> dict[str, Any]:
    """Return the state for the browser, as ``MembershipState`` in ``ui/src/model/membership.ts`` describes it."""
    arrivals = state.arrivals
    members = [
        {
            "rank": rank,
            "state": STATES.get(text, text.partition(":")[0]),
            "reason": visible(text.partition(":")[2].strip(), WIDEST),
            "host": plain_host(came.host) if (came := arrivals.get(rank)) is not None else "",
            "pid": came.pid if came is not None else 0,
            "since": came.when if came is not None else 0,
            "by": came.why if came is not None else "",
        }
        for rank, text in sorted(state.members.items())
    ]
    changes = [
        {
            "rank": one.rank,
            "what": one.what,
            "why": visible(one.why, WIDEST),
            "host": plain_host(one.host),
            "pid": one.pid,
            "when": one.when,
        }
        for one in state.history[-SENT:]
    ]
    cells = [
        {"label": label, "atLeast": bounds.at_least, "atMost": bounds.at_most, "ranks": list(ranks)}
        for label, bounds, ranks in state.cells
    ]
    return {
        "headline": headline(state),
        "generation": state.generation,
        "members": members,
        "newcomers": list(state.newcomers),
        "cells": cells,
        "history": changes,
        "earlier": max(0, len(state.history) - SENT),
    }


def clock(when: float) -> str:
    """Return seconds since 1970 as the time of the day."""
    return time.strftime("%H:%M:%S", time.localtime(when))


def plain_host(host: str) -> str:
    """Return a host's name without the part that distinguishes hosts of the same name."""
    return host.split("#")[0]


def _visible(*texts: str) -> tuple[str, ...]:
    return tuple(visible(text, WIDEST) for text in texts)


def _text(head: tuple[str, ...], rows: Rows) -> str:
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _html(head: tuple[str, ...], rows: Rows) -> str:
    def line(texts: tuple[str, ...], tag: str) -> str:
        return "".join(f'<{tag} style="text-align: left">{html.escape(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


Content = Mapping[str, Any]

LOST = "lost"


class ChangeablePool(Protocol):
    """Pool whose ranks can be shown and changed; :class:`hvdlab.kernel_ext.notebook.pool.Pool` is one."""

    @property
    def replaceable(self) -> bool: ...
    @property
    def state(self) -> str: ...
    def elastic(self) -> MembershipState: ...
    def on_membership_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...
    def resize(self, np: int) -> None: ...
    def repair(self) -> tuple[int, ...]: ...
    def restart(self, ranks: Sequence[int] | None = None) -> None: ...
    def sync(self, ranks: Sequence[int] | None = None) -> object: ...


class MembershipActions:
    """Actions of a view's buttons on a pool: one at a time, on a thread of its own, since some take a minute.

    Args:
        pool: The pool to change.
        recording: Its waiting threads are woken, on any thread, when :attr:`busy` has changed.

    Attributes:
        busy: The action under way, in words; empty if there is none.
    """

    def __init__(self, pool: ChangeablePool, recording: Recording) -> None:
        self._pool, self._recording = pool, recording
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.busy = ""

    def begin(self, content: Content, answer: Callable[[dict[str, Any]], None]) -> None:
        """Begin the action that a message of the page requests.

        Args:
            content: The message; its ``what`` is ``resize`` (with ``np``), ``repair``, ``restart`` (with ``ranks``) or ``sync``; ``ends``: the
                ranks that the user has agreed to end by it. If others would end as well, since the pool has changed
                meanwhile, nothing is done.
            answer: Called once with ``text``, or with ``error`` and a sentence, on this thread or another one.
        """
        with self._starting:
            if self.busy:
                answer({"error": f"wait until this is done: {self.busy}"})
                return
            try:
                label, act = self._prepared(content)
            except Exception as error:  # noqa: BLE001  (the page waits for an answer, whatever has failed)
                answer({"error": str(error) or type(error).__name__})
                return
            self.busy = label
            self._thread = threading.Thread(
                target=self._run, args=(act, answer), name="hvdlab-membership-action", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                self.busy = ""
                answer({"error": f"no thread can be started: {error}"})
                return
        self._recording.notify()

    def _run(self, act: Callable[[], str], answer: Callable[[dict[str, Any]], None]) -> None:
        try:
            reply = {"text": act()}
        except Exception as error:  # noqa: BLE001  (the page says it; there is no cell that could)
            reply = {"error": str(error) or type(error).__name__}
        # Before the answer: with it the page can send its next action.
        self.busy = ""
        try:
            self._recording.notify()
        finally:
            answer(reply)

    def _prepared(self, content: Content) -> tuple[str, Callable[[], str]]:
        """Return the requested action, in words, and the function that carries it out.

        Raises:
            InvalidRequestError: The request makes no sense, or would end ranks that the user has not agreed to end.
        """
        pool, what = self._pool, content.get("what")
        state = pool.elastic()
        living = [rank for rank, text in state.members.items() if not text.startswith(LOST)]
        if what == "resize":
            size = content.get("np")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InvalidRequestError("say how many ranks there are to be: 1 or more.")
            self._check_ends([rank for rank in living if rank >= size], content)
            return f"resize to {size}", lambda: self._resized(size)
        if what == "repair":
            return "repair", self._repaired
        if what == "restart":
            asked = content.get("ranks")
            ranks = sorted({r for r in asked if isinstance(r, int)}) if isinstance(asked, list) else []
            if not ranks or len(ranks) != len(asked or ()):
                raise InvalidRequestError("say which ranks to start again.")
            self._check_ends([rank for rank in ranks if rank in living], content)
            return f"restart of {format_ranks(ranks)}", lambda: self._restarted(ranks)
        if what == "sync":
            return "sync", lambda: str(pool.sync())
        raise InvalidRequestError(f"ranks can't be changed by `{what}`.")

    def _check_ends(self, ending: Sequence[int], content: Content) -> None:
        agreed = content.get("ends")
        known = agreed if isinstance(agreed, list) else []
        if others := [rank for rank in ending if rank not in known]:
            raise InvalidRequestError(
                f"nothing was done: {format_ranks(others)} would end, too, and you were not asked about that; the pool has "
                "changed meanwhile."
            )

    def _resized(self, size: int) -> str:
        self._pool.resize(size)
        return f"the pool has {size} {'rank' if size == 1 else 'ranks'}"

    def _repaired(self) -> str:
        back = self._pool.repair()
        if not back:
            return "no rank is missing"
        return f"{format_ranks(back)} {'is' if len(back) == 1 else 'are'} back, with empty memory"

    def _restarted(self, ranks: Sequence[int]) -> str:
        self._pool.restart(ranks)
        return f"{format_ranks(ranks)} started again, with empty memory"


INTERVAL = 0.5
"""Seconds between two questions to a pool that has not announced a change: cells begin and end, and ranks get ready."""


class MembershipNews:
    """Messages to a view of a pool's ranks, whenever these have changed.

    Args:
        pool: The pool.
        actions: The actions that change it.
        recording: Announces changes of the pool to threads that wait for news of the recording.

    Attributes:
        state: The pool's newest answer; None if it had ended before the first.
        asks_later: Whether :meth:`next_message` has not asked the pool, since it had done so just before: call it again soon.
    """

    def __init__(self, pool: ChangeablePool, actions: MembershipActions, recording: Recording) -> None:
        self._pool, self._actions, self._recording = pool, actions, recording
        self._unlisten = pool.on_membership_change(self._changed)
        #: Whether the pool has announced a change since it was asked.
        self._is_due = True
        #: When the pool was asked last, by `time.monotonic()`.
        self._asked = 0.0
        #: The last message of :meth:`next_message`: the pool's state, whether it had ended, and which action was running.
        self._given: tuple[MembershipState | None, bool, str] = (None, False, "")
        self.state: MembershipState | None = None
        self.asks_later = False

    def _changed(self) -> None:
        # Before the wake-up: the view's thread reads it as soon as it runs.
        self._is_due = True
        self._recording.notify()

    def forget(self) -> None:
        """Have the next :meth:`next_message` return all of it again."""
        self._is_due, self._given = True, (None, False, "")

    def next_message(self) -> dict[str, Any] | None:
        """Return all that a view shows, or None if nothing has changed."""
        pool, busy, now = self._pool, self._actions.busy, time.monotonic()
        self.asks_later = not self._is_due and now < self._asked + INTERVAL and busy == self._given[2]
        if self.asks_later:
            return None
        # Before the question: a change that the pool announces during it makes another question due.
        self._is_due, self._asked = False, now
        ended = pool.state == "stopped"
        if not ended:
            try:
                self.state = pool.elastic()
            except HvdlabError:  # the pool has ended, or broken down, just now
                ended = True
        given = self.state, ended, busy
        if self.state is None or given == self._given:
            return None
        self._given = given
        return membership_message(self.state) | {
            "ended": ended,
            "busy": busy,
            "replaceable": pool.replaceable,
            "now": time.time(),
        }

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._unlisten()

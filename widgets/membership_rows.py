"""Which ranks a pool has, since when and from where, as texts and as plain values; what became of the others."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.text import visible
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


class Change(Protocol):
    """Something that happened to a rank; its number is negative for what happened to all."""

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


class Bounds(Protocol):
    """How many ranks an elastic cell may have."""

    @property
    def at_least(self) -> int: ...
    @property
    def at_most(self) -> int | None: ...


class MembershipState(Protocol):
    """State of a pool's ranks; :class:`hvdlab.kernel_ext.notebook.membership_history.ElasticState` describes each part."""

    @property
    def generation(self) -> int: ...
    @property
    def cells(self) -> Sequence[tuple[str, Bounds, tuple[int, ...]]]: ...
    @property
    def members(self) -> Mapping[int, str]: ...
    @property
    def awaited(self) -> tuple[int, ...]: ...
    @property
    def arrivals(self) -> Mapping[int, Change]: ...
    @property
    def history(self) -> Sequence[Change]: ...
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
    """A row of texts for each rank, with the columns ``MEMBERS``."""
    found: Rows = []
    for rank, text in sorted(state.members.items()):
        came = state.arrivals.get(rank)
        host, pid, since, by = (
            (came.host, came.pid, clock(came.when), came.why) if came is not None else ("", 0, "", "")
        )
        found.append(_visible(str(rank), plain_host(host), str(pid or ""), text, since, by))
    return found


def history_rows(state: MembershipState, last: int) -> Rows:
    """A row of texts for each of the last changes, oldest first, with the columns ``HISTORY``."""
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
    """Headline and tables, for a terminal; ``last`` is the number of changes."""
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
    """The state for the browser: what ``MembershipState`` in ``ui/src/model/membership.ts`` describes."""
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
    """Seconds since 1970 as the time of the day."""
    return time.strftime("%H:%M:%S", time.localtime(when))


def plain_host(host: str) -> str:
    """A host's name without the part that distinguishes hosts of the same name."""
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

"""How a multiplexer asks several debug servers and gives one answer, and what it knows of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlab.kernel_ext.debugger.events import AskLocal, Effect, Expired, Json, Publish, Reply, ToRank
from hvdlab.kernel_ext.debugger.identifiers import Numbers

LOCAL = -1
"""The kernel's own debugger, in place of a rank."""

_EMPTY: Mapping[str, Json] = {
    "stackTrace": {"stackFrames": []},
    "scopes": {"scopes": []},
    "variables": {"variables": []},
    "setBreakpoints": {"breakpoints": []},
    "completions": {"targets": []},
    "richInspectVariables": {"data": {}, "metadata": {}},
}
"""What frontends expect in an answer, also in one that reports a failure."""

Place = tuple[str, int, str]
Take = Callable[[Json], list[Effect]]
Finish = Callable[[dict[int, Json]], list[Effect]]


@dataclass(slots=True)
class RankState:
    """A rank's debug server."""

    ready: bool = False
    seq: int = 0
    main: int = 1
    waiting: dict[int, tuple[str, Take]] = field(
        default_factory=dict
    )  # by number: command, and what takes the answer
    stopped: dict[int, Place | None] = field(
        default_factory=dict
    )  # thread to where it is; None if the rank was not asked
    going: bool = False  # an order to go on was sent, and the rank has not confirmed it


@dataclass(slots=True)
class Gathering:
    """A request of the frontend that several debug servers answer."""

    request: Json
    waiting: set[int]
    finish: Finish
    replies: dict[int, Json] = field(default_factory=dict)


class Asking:
    """Questions to the kernel's own debugger and to ranks, and how their answers become one.

    Args:
        cells: Beginning of the names of files that stand for cells.
    """

    def __init__(self, cells: str) -> None:
        self._cells = cells
        self._ranks: dict[int, RankState] = {}
        self._open: dict[int, Gathering] = {}
        self._threads, self._frames, self._variables = Numbers(), Numbers(), Numbers()
        self._knows_threads = False
        self._seq = 0

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks that have stopped."""
        return tuple(sorted(rank for rank, one in self._ranks.items() if one.stopped))

    def _talking(self) -> list[int]:
        return sorted(rank for rank, one in self._ranks.items() if one.ready)

    def _ask(self, rank: int, command: str, arguments: Json, take: Take) -> list[Effect]:
        one = self._ranks[rank]
        one.seq += 1
        one.waiting[one.seq] = command, take
        message = {"type": "request", "seq": one.seq, "command": command, "arguments": arguments}
        return [ToRank(rank, message)]

    def _gather(self, key: int, request: Json, asked: Mapping[int, Json], finish: Finish) -> list[Effect]:
        """Ask each of these debug servers its own version of the request, and call ``finish`` when all have answered."""
        self._open[key] = Gathering(request, set(asked), finish)
        effects: list[Effect] = []
        for rank, version in asked.items():
            if rank == LOCAL:
                effects.append(AskLocal(key, version))
            else:
                take = _taker(self, key, rank)
                effects += self._ask(rank, version["command"], version.get("arguments") or {}, take)
        return effects if asked else self._expired(Expired(key))

    def _answered(self, key: int, rank: int, reply: Json) -> list[Effect]:
        gathering = self._open.get(key)
        if gathering is None or rank not in gathering.waiting:
            return []
        gathering.waiting.discard(rank)
        gathering.replies[rank] = reply
        if gathering.waiting:
            return []
        del self._open[key]
        return gathering.finish(gathering.replies)

    def _answered_by(self, rank: int, reply: Json) -> list[Effect]:
        """A rank is ready, or gone: ``attach``, which waits for ranks and not for answers, waits for it no more."""
        effects: list[Effect] = []
        for key, gathering in list(self._open.items()):
            if gathering.request.get("command") == "attach":
                effects += self._answered(key, rank, reply)
        return effects

    def _expired(self, event: Expired) -> list[Effect]:
        """The time of ranks is up: finish without them. The kernel's own debugger is waited for: it always answers, if
        only when a cell has ended."""
        gathering = self._open.get(event.key)
        if gathering is None:
            return []
        gathering.waiting &= {LOCAL}
        if gathering.waiting:
            return []
        del self._open[event.key]
        return gathering.finish(gathering.replies)

    def _only(self, key: int, request: Json) -> list[Effect]:
        """Wait for the kernel's own debugger alone."""
        self._open[key] = Gathering(request, {LOCAL}, lambda got: self._first(key, request, got))
        return []

    def _first(self, key: int, request: Json, got: dict[int, Json]) -> list[Effect]:
        """Reply with the answer of the kernel's own debugger."""
        if LOCAL in got:
            return [Reply(key, got[LOCAL])]
        return [self._failed(key, request, "the kernel does not answer")]

    def _response(self, key: int, request: Json, body: Json) -> Reply:
        return Reply(key, {**_answer(request), "success": True, "body": body})

    def _failed(self, key: int, request: Json, why: str) -> Reply:
        body = _EMPTY.get(request.get("command", ""), {})
        return Reply(key, {**_answer(request), "success": False, "message": why, "body": dict(body)})

    def _event(self, name: str, body: Json) -> Publish:
        self._seq += 1
        return Publish({"type": "event", "seq": self._seq, "event": name, "body": body})


def _taker(asking: Asking, key: int, rank: int) -> Take:
    return lambda reply: asking._answered(key, rank, reply)


def _answer(request: Json) -> dict[str, Any]:
    seq = request.get("seq", 0)
    return {"type": "response", "seq": seq, "request_seq": seq, "command": request.get("command", "")}

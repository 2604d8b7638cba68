"""One frontend, one kernel and any number of ranks in one debugging session.

A pure state machine over the Debug Adapter Protocol: the frontend asks, and the answer is made of the answers of the kernel's
own debugger and of the ranks' debug servers. For the frontend, ranks are threads. JupyterLab shows the stack of one thread
only; so it gets the frames of all ranks that have stopped, each with its rank. The rank whose frame the user selected last is
the one that steps, and with it those that have stopped at the same line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hvdlab.kernel_ext.debugger.asking import LOCAL, RankState
from hvdlab.kernel_ext.debugger.choosing import SCOPE
from hvdlab.kernel_ext.debugger.events import (
    AskLocal,
    CloseRank,
    Effect,
    Event,
    Json,
    LocalReplied,
    OpenRank,
    RankGone,
    RankOpened,
    RankSaid,
    Reminded,
    Reply,
    Requested,
    Wanted,
)
from hvdlab.kernel_ext.debugger.going import STEPS
from hvdlab.kernel_ext.debugger.looking import Looking

_BY_FRAME = frozenset({"scopes", "evaluate", "setExpression", "completions", "stepInTargets", "gotoTargets"})
_BY_VARIABLE = frozenset({"variables", "setVariable"})
_BY_THREAD = frozenset({"exceptionInfo", "goto"})
_KEPT = ("setExceptionBreakpoints", "setFunctionBreakpoints")


class Multiplexer(Looking):
    """The state machine of one debugging session. :meth:`handle` takes an event and returns the effects to carry out.

    Args:
        attach: Arguments of ``attach`` for ranks.
        cells: Beginning of the names of files that stand for cells.
        for_ranks: Whether the cell in such a file runs on ranks only.
    """

    def __init__(self, attach: Json, cells: str, for_ranks: Callable[[str], bool]) -> None:
        super().__init__(cells)
        self._attach, self._for_ranks = attach, for_ranks
        self._on = False
        self._refused: dict[int, str] = {}
        self._initialize: Json = {}
        self._breakpoints: dict[str, Json] = {}
        self._kept: dict[str, Json] = {}

    # -- state -----------------------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether the frontend has attached."""
        return self._on

    @property
    def pending(self) -> tuple[int, ...]:
        """Ranks whose debug servers are not ready yet. Any thread."""
        # A copy, made in one go: the main thread asks while the loop adds ranks.
        return tuple(rank for rank, one in list(self._ranks.items()) if not one.ready)

    @property
    def known(self) -> tuple[int, ...]:
        """Ranks that are debugged, or soon will be."""
        return tuple(self._ranks)

    @property
    def left_out(self) -> dict[int, str]:
        """Ranks that can't be debugged, and why."""
        return dict(self._refused)

    def adopt(self, breakpoints: Mapping[str, list[Json]]) -> None:
        """The frontend has attached already, and set these breakpoints, by file."""
        self._on = True
        self._initialize = {
            "adapterID": "",
            "pathFormat": "path",
            "linesStartAt1": True,
            "columnsStartAt1": True,
        }
        self._breakpoints = {
            path: {"source": {"path": path}, "breakpoints": points} for path, points in breakpoints.items()
        }

    # -- events ----------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Take an event."""
        return self._take(event) + self._tell_scope()

    def _take(self, event: Event) -> list[Effect]:
        if isinstance(event, Requested):
            return self._requested(event)
        if isinstance(event, LocalReplied):
            return self._answered(event.key, LOCAL, event.reply)
        if isinstance(event, RankSaid):
            return self._said(event.rank, event.message)
        if isinstance(event, RankOpened):
            return self._opened(event.rank)
        if isinstance(event, RankGone):
            refusal = self._refuse(event.rank, event.reason) if event.refused else []
            return refusal + self._gone(event.rank, event.reason)
        if isinstance(event, Wanted):
            return self._wanted(event.ranks)
        if isinstance(event, Reminded):
            return self._step_over()
        return self._expired(event)

    def _wanted(self, ranks: Iterable[int]) -> list[Effect]:
        new = [rank for rank in ranks if rank not in self._ranks] if self._on else []
        self._ranks.update((rank, RankState()) for rank in new)
        return [OpenRank(rank) for rank in new]

    def _opened(self, rank: int) -> list[Effect]:
        """Send a rank that has just come what the others have got before."""
        if rank not in self._ranks:
            return [CloseRank(rank)]
        effects: list[Effect] = []
        for command, arguments in (
            ("initialize", self._initialize),
            ("attach", self._attach),
            *(("setBreakpoints", arguments) for arguments in self._breakpoints.values()),
            *((command, arguments) for command, arguments in self._kept.items()),
        ):
            effects += self._ask(rank, command, arguments, lambda reply: [])
        effects += self._ask(rank, "threads", {}, lambda reply: self._learn_main(rank, reply))
        return effects + self._ask(rank, "configurationDone", {}, lambda reply: self._ready(rank))

    def _learn_main(self, rank: int, reply: Json) -> list[Effect]:
        for thread in (reply.get("body") or {}).get("threads", ()):
            if thread["name"] == "MainThread" and rank in self._ranks:
                self._ranks[rank].main = thread["id"]
        return []

    def _ready(self, rank: int) -> list[Effect]:
        if rank in self._ranks:
            self._ranks[rank].ready = True
            self._refused.pop(rank, None)
        return self._answered_by(rank, {"success": True})

    def _refuse(self, rank: int, reason: str) -> list[Effect]:
        """A rank can't take part; what runs there does not stop."""
        if self._refused.get(rank) == reason or rank not in self._ranks:
            return []
        self._refused[rank] = reason
        return [self._event("output", {"category": "stderr", "output": f"{not_debugged(rank, reason)}\n"})]

    def _gone(self, rank: int, reason: str) -> list[Effect]:
        one = self._ranks.pop(rank, None)
        if one is None:
            return []
        effects: list[Effect] = [self._continued(rank, thread) for thread in one.stopped]
        self._forget(rank)
        failure = {"success": False, "message": f"rank {rank} is gone: {reason}"}
        for _, take in list(one.waiting.values()):
            effects += take(failure)
        effects += self._answered_by(rank, failure)
        return effects + (self._step_over() if rank == self._stepping else self._show_again())

    # -- requests --------------------------------------------------------------------------------------------------------

    def _requested(self, event: Requested) -> list[Effect]:
        key, request = event.key, event.request
        command, arguments = request.get("command", ""), request.get("arguments") or {}
        if command == "initialize":
            self._initialize = arguments
        elif command == "attach":
            return self._start(key, request)
        elif command in ("disconnect", "terminate"):
            return self._end(key, request)
        elif command == "debugInfo":
            return self._gather(key, request, {LOCAL: request}, lambda got: self._info(key, request, got))
        elif command == SCOPE:
            return self._answer_scope(key, request, arguments.get("alone"))
        elif command == "threads":
            return self._list_threads(key, request)
        elif command == "setBreakpoints":
            return self._set_breakpoints(key, request, arguments)
        elif command in _KEPT:
            self._kept[command] = arguments
            asked = {rank: request for rank in (LOCAL, *self._talking())}
            return self._gather(key, request, asked, lambda got: self._first(key, request, got))
        return self._about_ranks(event, command, arguments) or [
            AskLocal(key, request),
            *self._only(key, request),
        ]

    def _about_ranks(self, event: Requested, command: str, arguments: Json) -> list[Effect]:
        """The effects of a request about a rank's thread, frame or variable; empty for any other request."""
        key, request = event.key, event.request
        if command in _BY_FRAME or command in ("richInspectVariables", "copyToGlobals"):
            name = "srcFrameId" if command == "copyToGlobals" else "frameId"
            return self._by_number(key, request, name, self._frames)
        if command in _BY_VARIABLE:
            return self._by_number(key, request, "variablesReference", self._variables)
        if command == "pause":
            return self._pause(event)
        if command in {"stackTrace", "continue"} | STEPS | _BY_THREAD:
            thread = self._thread(event)
            if thread is None and not event.local_stopped and self._on and command not in _BY_THREAD:
                # The kernel's own debugger would answer only once it has stopped and goes on, and no other request before.
                return [self._answer_unasked(key, request)]
            if thread is None:
                gone = self._threads.issued(arguments.get("threadId"))
                return [self._failed(key, request, "that rank has not stopped")] if gone else []
            if command == "stackTrace":
                return self._stacks(key, request, thread)
            if command in _BY_THREAD:
                return self._pass_on(key, request, thread[0], {**arguments, "threadId": thread[1]})
            return self._go(key, request, thread)
        return []

    def _answer_unasked(self, key: int, request: Json) -> Reply:
        """The answer when neither the kernel nor a rank has stopped: a button was pressed too late, or twice."""
        body: dict[str, Json] = {"stackTrace": {"stackFrames": []}, "continue": {"allThreadsContinued": True}}
        return self._response(key, request, body.get(request["command"], {}))

    def _thread(self, event: Requested) -> tuple[int, int] | None:
        """The rank's thread that is meant. JupyterLab says 1 when it means the one that it shows."""
        arguments, command = event.request.get("arguments") or {}, event.request.get("command")
        number = arguments.get("threadId")
        # JupyterLab may also name the thread that has stopped first, whichever frame is selected.
        exact = self._knows_threads or arguments.get("singleThread") or command in _BY_THREAD
        if self._threads.issued(number):
            meant = self._threads.meant(number)
            if meant is not None and meant[1] in self._ranks[meant[0]].stopped and exact:
                return meant
            if self._knows_threads or not self.stopped:
                return None
        elif event.local_stopped or not self.stopped:
            return None
        rank = self._shown()
        return rank, next(iter(self._ranks[rank].stopped))

    def _start(self, key: int, request: Json) -> list[Effect]:
        self._on = True
        asked = {LOCAL: request}
        effects = self._gather(key, request, asked, lambda got: self._first(key, request, got))
        self._open[key].waiting |= set(self.pending)
        return effects

    def wait_for(self, key: int, ranks: Iterable[int]) -> list[Effect]:
        """Let ``attach`` be answered when these ranks are ready as well. Call it right after the request."""
        effects = self._wanted(ranks)
        if key in self._open:
            self._open[key].waiting |= set(self.pending)
        return effects

    def _end(self, key: int, request: Json) -> list[Effect]:
        effects: list[Effect] = [CloseRank(rank) for rank in self._ranks]
        for rank in list(self._ranks):
            effects += self._gone(rank, "the debugger was switched off")
        self._on, self._knows_threads, self._alone = False, False, False
        self._breakpoints, self._kept, self._refused = {}, {}, {}
        self._stepping, self._held = None, []
        return [*effects, AskLocal(key, request), *self._only(key, request)]

    def _info(self, key: int, request: Json, got: dict[int, Json]) -> list[Effect]:
        reply = dict(got.get(LOCAL) or self._failed(key, request, "the kernel does not answer").response)
        body = dict(reply.get("body") or {})
        mine = {path: one for path, one in self._breakpoints.items() if self._is_for_ranks(path)}
        known = [one for one in body.get("breakpoints", []) if one["source"] not in mine]
        known += [
            {"source": path, "breakpoints": one.get("breakpoints", [])}
            for path, one in mine.items()
            if one.get("breakpoints")
        ]
        body["breakpoints"] = known
        body["stoppedThreads"] = [*body.get("stoppedThreads", ()), *self._stopped_threads()]
        return [Reply(key, {**reply, "body": body})]

    def _stopped_threads(self) -> list[int]:
        return [
            self._threads.give(rank, thread) for rank in self.stopped for thread in self._ranks[rank].stopped
        ]

    def _list_threads(self, key: int, request: Json) -> list[Effect]:
        self._knows_threads = True
        asked = {rank: request for rank in (LOCAL, *self._talking())}

        def finish(got: dict[int, Json]) -> list[Effect]:
            threads = list((got.get(LOCAL, {}).get("body") or {}).get("threads", ()))
            for rank in sorted(set(got) - {LOCAL}):
                for thread in (got[rank].get("body") or {}).get("threads", ()):
                    number = self._threads.give(rank, thread["id"])
                    threads.append({"id": number, "name": f"rank {rank}: {thread['name']}"})
            return [self._response(key, request, {"threads": threads})]

        return self._gather(key, request, asked, finish)

    def _set_breakpoints(self, key: int, request: Json, arguments: Json) -> list[Effect]:
        path = (arguments.get("source") or {}).get("path", "")
        self._breakpoints[path] = arguments
        local = arguments if not self._is_for_ranks(path) else {**arguments, "breakpoints": []}
        asked = {rank: request for rank in self._talking()} | {LOCAL: {**request, "arguments": local}}

        def finish(got: dict[int, Json]) -> list[Effect]:
            replies = [got[one] for one in sorted(got) if one != LOCAL or not self._is_for_ranks(path)]
            found = [(reply.get("body") or {}).get("breakpoints", []) for reply in replies]
            points = []
            for place, wanted in enumerate(arguments.get("breakpoints") or ()):
                set_ones = [one[place] for one in found if place < len(one)]
                best = next((one for one in set_ones if one.get("verified")), None)
                point = best or {"verified": bool(not set_ones), "line": wanted["line"]}
                points.append({**point, "source": {"path": path}})
            self._breakpoints[path] = {
                **arguments,
                "breakpoints": [
                    {**wanted, "line": point.get("line", wanted["line"])}
                    for wanted, point in zip(arguments.get("breakpoints") or (), points, strict=True)
                ],
            }
            return [self._response(key, request, {"breakpoints": points})]

        return self._gather(key, request, asked, finish)

    def _is_for_ranks(self, path: str) -> bool:
        return path.startswith(self._cells) and self._for_ranks(path)


def not_debugged(rank: int, reason: str) -> str:
    """The sentence for the user about a rank that can't be debugged."""
    return f"rank {rank} does not stop at breakpoints: {reason}"

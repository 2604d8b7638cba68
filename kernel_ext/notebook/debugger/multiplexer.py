"""One frontend, one kernel and any number of ranks in one debugging session.

A pure state machine over the Debug Adapter Protocol: the frontend asks, and the answer is made of the answers of the kernel's
own debugger and of the ranks' debug servers. For the frontend, ranks are threads. JupyterLab shows the stack of one thread
only; so it gets the frames of all ranks that have stopped, each with its rank. The rank whose frame the user selected last is
the one that steps, and with it those that have stopped at the same line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlab.kernel_ext.notebook.debugger.dap_state import (
    AskLocal,
    CloseRank,
    Effect,
    Event,
    Expired,
    Json,
    LocalReplied,
    Numbers,
    OpenRank,
    Publish,
    RankGone,
    RankOpened,
    RankSaid,
    Remind,
    Reminded,
    ReplyToFrontend,
    Requested,
    SetDebuggedRanks,
    ToRank,
)

_MODULES = ("name", "doc", "package", "loader", "spec", "annotations", "builtins", "builtin")
_IPYTHONS = ("get_ipython", "exit", "quit", "In", "Out", "_oh", "_dh", "_ih", "__", "___")
_HIDDEN = frozenset([*(f"__{name}__" for name in _MODULES), *_IPYTHONS])
_VARIABLE_HINTS = re.compile(r"_i*\d*\Z")


def shown(name: str) -> bool:
    """Return whether a debugger shows a variable of this name: not those that Python and IPython keep for themselves."""
    return name not in _HIDDEN and not _VARIABLE_HINTS.match(name)


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
"""Fields that frontends expect in an answer, also in one that reports a failure."""

Place = tuple[str, int, str]
Take = Callable[[Json], list[Effect]]
Finish = Callable[[dict[int, Json]], list[Effect]]


@dataclass(slots=True)
class DebuggedRank:
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
class PendingReplies:
    """A request of the frontend that several debug servers answer."""

    request: Json
    waiting: set[int]
    finish: Finish
    replies: dict[int, Json] = field(default_factory=dict)


def _taker(multiplexer: Multiplexer, key: int, rank: int) -> Take:
    return lambda reply: multiplexer._answered(key, rank, reply)


def _answer(request: Json) -> dict[str, Any]:
    seq = request.get("seq", 0)
    return {"type": "response", "seq": seq, "request_seq": seq, "command": request.get("command", "")}


_ABOUT_FRAMES = frozenset({"scopes", "variables", "evaluate", "setVariable", "setExpression", "completions"})
STEPS = frozenset({"next", "stepIn", "stepOut"})


SCOPE = "hvdlab/scope"
"""A request of our own. ``alone`` among its arguments chooses; the answer has the present choice.

A frontend that has sent it gets an event of this name, with the same body, after each change.
"""
WORDS = {"%one": True, "%all": False}
"""Expressions that choose, for frontends that have no button for it."""
NOBODY: Json = {"alone": False, "rank": None, "stoppedRanks": []}


_BY_FRAME = frozenset({"scopes", "evaluate", "setExpression", "completions", "stepInTargets", "gotoTargets"})
_BY_VARIABLE = frozenset({"variables", "setVariable"})
_BY_THREAD = frozenset({"exceptionInfo", "goto"})
_KEPT = ("setExceptionBreakpoints", "setFunctionBreakpoints")


class Multiplexer:
    """The state machine of one debugging session. :meth:`handle` takes an event and returns the effects to carry out.

    Args:
        attach: Arguments of ``attach`` for ranks.
        cells: Beginning of the names of files that stand for cells.
        for_ranks: Such a file to whether its cell runs on ranks only. The caller adds files while the session goes on.
    """

    def __init__(self, attach: Json, cells: str, for_ranks: Mapping[str, bool]) -> None:
        #: The rank whose frame the user has selected: the buttons move it.
        self._selected = 0
        #: Whether the buttons move that rank only, and not all that have stopped.
        self._alone = False
        self._stepping: int | None = None  # the selected rank, while it steps
        self._held: list[tuple[int, Json]] = []  # the ``stopped`` events of others meanwhile
        self._sent_scope: Json | None = None  # what a frontend that has asked knows
        self._cells = cells
        self._ranks: dict[int, DebuggedRank] = {}
        #: Key of each request of the frontend that has no answer yet.
        self._open: dict[int, PendingReplies] = {}
        self._threads, self._frames, self._variables = Numbers(), Numbers(), Numbers()
        #: Whether the frontend asks for threads: it shows each by itself, so stacks of ranks must not be joined.
        self._knows_threads = False
        self._seq = 0
        self._attach, self._for_ranks = attach, for_ranks
        self._on = False
        #: Rank to the reason why it can't be debugged, as the user has seen it.
        self._refused: dict[int, str] = {}
        #: Arguments of the frontend's `initialize`: ranks that come later get the same.
        self._initialize: Json = {}
        #: File to the last `setBreakpoints`, with the lines to which a debug server moved them, for
        #: ranks that come later.
        self._breakpoints: dict[str, Json] = {}
        #: Command to arguments of other settings, for ranks that come later.
        self._kept: dict[str, Json] = {}

    # -- state -----------------------------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Return whether the frontend has attached."""
        return self._on

    @property
    def pending(self) -> tuple[int, ...]:
        """Return the ranks whose debug servers are not ready yet. Any thread."""
        # A copy, made in one go: the main thread asks while the loop adds ranks.
        return tuple(rank for rank, one in list(self._ranks.items()) if not one.ready)

    @property
    def known(self) -> tuple[int, ...]:
        """Return the ranks that are debugged, or soon will be."""
        return tuple(self._ranks)

    @property
    def left_out(self) -> dict[int, str]:
        """Return the ranks that can't be debugged, with the reasons."""
        return dict(self._refused)

    def adopt(self, breakpoints: Mapping[str, list[Json]]) -> None:
        """Go on for a frontend that has attached already, and has set these breakpoints, by file."""
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
        if isinstance(event, SetDebuggedRanks):
            return self._wanted(event.ranks)
        if isinstance(event, Reminded):
            return self._step_over()
        return self._expired(event)

    def _wanted(self, ranks: Iterable[int]) -> list[Effect]:
        new = [rank for rank in ranks if rank not in self._ranks] if self._on else []
        self._ranks.update((rank, DebuggedRank()) for rank in new)
        return [OpenRank(rank) for rank in new]

    def _opened(self, rank: int) -> list[Effect]:
        """Send a rank that has just come the requests that the others have got before."""
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
        """Report that a rank can't take part: its code does not stop."""
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
        """Return the effects of a request about a rank's thread, frame or variable; empty for any other request."""
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
                gone = self._threads.is_assigned(arguments.get("threadId"))
                return [self._failed(key, request, "that rank has not stopped")] if gone else []
            if command == "stackTrace":
                return self._stacks(key, request, thread)
            if command in _BY_THREAD:
                return self._pass_on(key, request, thread[0], {**arguments, "threadId": thread[1]})
            return self._go(key, request, thread)
        return []

    def _answer_unasked(self, key: int, request: Json) -> ReplyToFrontend:
        """Return the answer if neither the kernel nor a rank has stopped: a button was pressed too late, or twice."""
        body: dict[str, Json] = {"stackTrace": {"stackFrames": []}, "continue": {"allThreadsContinued": True}}
        return self._response(key, request, body.get(request["command"], {}))

    def _thread(self, event: Requested) -> tuple[int, int] | None:
        """Return the rank and thread that a request is for. JupyterLab sends 1 for the thread that it shows."""
        arguments, command = event.request.get("arguments") or {}, event.request.get("command")
        number = arguments.get("threadId")
        # JupyterLab may also name the thread that has stopped first, whichever frame is selected.
        exact = self._knows_threads or arguments.get("singleThread") or command in _BY_THREAD
        if self._threads.is_assigned(number):
            meant = self._threads.resolve(number)
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
        return [ReplyToFrontend(key, {**reply, "body": body})]

    def _stopped_threads(self) -> list[int]:
        return [
            self._threads.assign(rank, thread)
            for rank in self.stopped
            for thread in self._ranks[rank].stopped
        ]

    def _list_threads(self, key: int, request: Json) -> list[Effect]:
        self._knows_threads = True
        asked = {rank: request for rank in (LOCAL, *self._talking())}

        def finish(got: dict[int, Json]) -> list[Effect]:
            threads = list((got.get(LOCAL, {}).get("body") or {}).get("threads", ()))
            for rank in sorted(set(got) - {LOCAL}):
                for thread in (got[rank].get("body") or {}).get("threads", ()):
                    number = self._threads.assign(rank, thread["id"])
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
        return path.startswith(self._cells) and self._for_ranks.get(path, False)

    # -- stopping, stepping and going on ---------------------------------------------------------------------------------

    def _shown(self) -> int:
        """Return the rank that the frontend shows."""
        return self._selected if self._selected in self.stopped else self.stopped[0]

    def _go(self, key: int, request: Json, thread: tuple[int, int]) -> list[Effect]:
        arguments = request.get("arguments") or {}
        one = self._alone or bool(arguments.get("singleThread"))
        step = request["command"] in STEPS
        if one or (step and self._knows_threads):
            going = [thread]
        elif step:
            going = self._beside(thread)
        else:
            going = [(rank, next(iter(self._ranks[rank].stopped))) for rank in self.stopped]
        asked = {rank: {**request, "arguments": {**arguments, "threadId": own}} for rank, own in going}
        for rank, _ in going:
            # Before the rank confirms it: `_show_again` must not show it as stopped meanwhile.
            self._ranks[rank].going = True
        everything = {rank for rank, _ in going} == set(self.stopped)

        def finish(got: dict[int, Json]) -> list[Effect]:
            return [self._response(key, request, {} if step else {"allThreadsContinued": everything})]

        effects = self._gather(key, request, asked, finish)
        if step and not self._knows_threads:
            self._stepping = thread[0]
            effects.append(Remind())
        return effects

    def _step_over(self) -> list[Effect]:
        """Publish the events of other ranks that were held back: the selected rank has stepped, or takes long."""
        self._stepping = None
        held, self._held = self._held, []
        events = [self._event("stopped", body) for rank, body in held if rank in self.stopped]
        return list(events) or self._show_again()

    def _beside(self, thread: tuple[int, int]) -> list[tuple[int, int]]:
        """Return this thread, and those of other ranks that are known to have stopped at the same line."""
        place = self._ranks[thread[0]].stopped[thread[1]]
        return [thread] + [
            (rank, number)
            for rank in self.stopped
            for number, other in self._ranks[rank].stopped.items()
            if rank != thread[0] and place is not None and other == place
        ]

    def _pause(self, event: Requested) -> list[Effect]:
        key, request = event.key, event.request
        meant = self._threads.resolve((request.get("arguments") or {}).get("threadId"))
        if meant is None and (event.local_stopped or not self._talking()):
            return []
        pausing = [meant] if meant is not None else [(r, self._ranks[r].main) for r in self._talking()]
        asked = {rank: {**request, "arguments": {"threadId": number}} for rank, number in pausing}
        return self._gather(key, request, asked, lambda got: [self._response(key, request, {})])

    def _said(self, rank: int, message: Json) -> list[Effect]:
        one = self._ranks.get(rank)
        if one is None:
            return []
        if message.get("type") == "response":
            _, take = one.waiting.pop(message.get("request_seq", -1), ("", None))
            return take(message) if take is not None else []
        body = message.get("body") or {}
        name = message.get("event")
        if name == "stopped":
            return self._stop(rank, one, body)
        if name == "continued":
            everything = body.get("allThreadsContinued")
            going = list(one.stopped) if everything else [t for t in one.stopped if t == body.get("threadId")]
            return self._goes_on(rank, one, going)
        if name == "thread" and body.get("reason") == "exited":
            effects = self._goes_on(rank, one, [t for t in one.stopped if t == body.get("threadId")])
            self._threads.drop_one(rank, body.get("threadId", 0))
            return effects
        if name == "output" and body.get("category") not in ("telemetry", "console"):
            return [self._event("output", {**body, "output": f"[{rank}] {body.get('output', '')}"})]
        return []

    def _stop(self, rank: int, one: DebuggedRank, body: Json) -> list[Effect]:
        if not self.stopped and self._stepping is None:
            self._selected = rank
        one.stopped[body.get("threadId", one.main)] = None
        # Each debug server numbers breakpoints by itself: a rank's numbers mean nothing to the frontend.
        stopped = {key: value for key, value in body.items() if key != "hitBreakpointIds"}
        stopped |= {
            "threadId": self._threads.assign(rank, body.get("threadId", one.main)),
            "allThreadsStopped": False,
            "description": f"rank {rank}: {body.get('description') or body.get('reason', 'stopped')}",
        }
        if self._stepping not in (None, rank):
            self._held.append((rank, stopped))
            return []
        before = self._step_over() if self._held else []
        self._stepping = None
        return [*before, self._event("stopped", stopped)]

    def _goes_on(self, rank: int, one: DebuggedRank, threads: Iterable[int]) -> list[Effect]:
        effects: list[Effect] = []
        one.going = False
        for thread in threads:
            del one.stopped[thread]
            effects.append(self._continued(rank, thread))
        if effects and not one.stopped:
            self._forget_stacks(rank)
            effects += self._give_up(one)
        return effects + (self._show_again() if effects else [])

    def _give_up(self, one: DebuggedRank) -> list[Effect]:
        """Fail questions about frames of a rank that goes on: their answers may never come, as of an endless ``__repr__``."""
        effects: list[Effect] = []
        for seq, (command, take) in list(one.waiting.items()):
            if command in _ABOUT_FRAMES:
                del one.waiting[seq]
                effects += take({"success": False, "message": "that rank goes on"})
        return effects

    def _continued(self, rank: int, thread: int) -> Effect:
        number = self._threads.assign(rank, thread)
        return self._event("continued", {"threadId": number, "allThreadsContinued": False})

    def _show_again(self) -> list[Effect]:
        """Publish ``stopped`` again for a rank that has not gone on: JupyterLab empties its frames when any thread goes on."""
        staying = [rank for rank in self.stopped if not self._ranks[rank].going]
        if self._knows_threads or self._stepping is not None or not staying:
            return []
        rank = self._selected if self._selected in staying else staying[0]
        number = self._threads.assign(rank, next(iter(self._ranks[rank].stopped)))
        body = {
            "reason": "pause",
            "threadId": number,
            "allThreadsStopped": False,
            "description": f"rank {rank}",
        }
        return [self._event("stopped", body)]

    def _forget_stacks(self, rank: int) -> None:
        self._frames.drop(rank)
        self._variables.drop(rank)

    def _forget(self, rank: int) -> None:
        self._forget_stacks(rank)
        self._threads.drop(rank)

    # -- which ranks the buttons move ------------------------------------------------------------------------------------

    def _scope(self) -> Json:
        """Return whether the buttons move one rank only, which one that is, and which ranks have stopped."""
        rank = self._shown() if self.stopped else None
        return {"alone": self._alone, "rank": rank, "stoppedRanks": list(self.stopped)}

    def _answer_scope(self, key: int, request: Json, alone: object) -> list[Effect]:
        if isinstance(alone, bool):
            self._alone = alone
        self._sent_scope = self._scope()
        return [self._response(key, request, self._sent_scope)]

    def _tell_scope(self) -> list[Effect]:
        """Send a changed scope to a frontend that has asked for it once; not while ranks have only begun a step."""
        if (
            self._sent_scope is None
            or self._stepping is not None
            or (now := self._scope()) == self._sent_scope
        ):
            return []
        self._sent_scope = now
        return [self._event(SCOPE, now)]

    def _choose(self, key: int, request: Json, alone: bool) -> list[Effect]:
        self._alone = alone
        whom = "only the rank whose frame is selected" if alone else "all ranks that have stopped"
        return [self._response(key, request, {"result": f"the buttons move {whom}", "variablesReference": 0})]

    # -- frames and variables --------------------------------------------------------------------------------------------

    def _by_number(self, key: int, request: Json, name: str, numbers: Numbers) -> list[Effect]:
        arguments = request.get("arguments") or {}
        number = arguments.get(name)
        if not numbers.is_assigned(number):
            return []
        meant = numbers.resolve(number)
        if meant is None:
            return [self._failed(key, request, "that rank goes on")]
        rank, own = meant
        command = request["command"]
        if (
            command == "evaluate"
            and (alone := WORDS.get(str(arguments.get("expression")).strip())) is not None
        ):
            return self._choose(key, request, alone)
        if command == "scopes" and self._stepping is None:
            self._selected = rank
        if command == "copyToGlobals":
            return self._copy(key, request, rank, own)
        if command == "richInspectVariables":
            return self._rich(key, request, rank, own)
        return self._pass_on(key, request, rank, {**arguments, name: own})

    def _pass_on(self, key: int, request: Json, rank: int, arguments: Json) -> list[Effect]:
        asked = {rank: {**request, "arguments": arguments}}

        def finish(got: dict[int, Json]) -> list[Effect]:
            reply = got.get(rank)
            if reply is None or not reply.get("success", True):
                return [
                    self._failed(key, request, (reply or {}).get("message") or f"rank {rank} does not answer")
                ]
            return [self._response(key, request, self._renumbered(rank, reply.get("body") or {}))]

        return self._gather(key, request, asked, finish)

    def _renumbered(self, rank: int, body: Json) -> Json:
        """Return the body of an answer with the numbers of variables that the frontend knows."""
        body = dict(body)
        if "variables" in body:
            body["variables"] = [one for one in body["variables"] if shown(one.get("name", ""))]
        for name in ("variables", "scopes"):
            if name in body:
                body[name] = [self._renumbered(rank, one) for one in body[name]]
        if body.get("variablesReference"):
            body["variablesReference"] = self._variables.assign(rank, body["variablesReference"])
        return body

    def _copy(self, key: int, request: Json, rank: int, frame: int) -> list[Effect]:
        arguments = request["arguments"]
        names = [arguments.get("dstVariableName", ""), arguments.get("srcVariableName", "")]
        # The names become parts of an expression, which the rank evaluates.
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            return [self._failed(key, request, "these are no names of variables")]
        inner = {"expression": f"globals()[{names[0]!r}]", "value": names[1], "frameId": frame}
        return self._pass_on(key, {**request, "command": "setExpression"}, rank, inner)

    def _rich(self, key: int, request: Json, rank: int, frame: int) -> list[Effect]:
        """Return a variable as a cell would show it, in the same way as the kernel's own debugger does it."""
        name = request["arguments"].get("variableName", "")
        if not name.isidentifier():
            return [self._response(key, request, {"data": {}, "metadata": {}})]
        code = f"get_ipython().display_formatter.format({name})"
        inner = {"expression": code, "frameId": frame, "context": "clipboard"}
        asked = {rank: {**request, "command": "evaluate", "arguments": inner}}

        def finish(got: dict[int, Json]) -> list[Effect]:
            try:
                # The text can come from a `__repr__` of the user's: `literal_eval` runs none of it here.
                data, metadata = ast.literal_eval(got[rank]["body"]["result"])
            except (KeyError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
                return [self._failed(key, request, f"rank {rank} can't show it")]
            return [self._response(key, request, {"data": data, "metadata": metadata})]

        return self._gather(key, request, asked, finish)

    def _stacks(self, key: int, request: Json, thread: tuple[int, int]) -> list[Effect]:
        """Return the stack of a thread; for a frontend that asks for no threads those of all ranks that have stopped."""
        first = thread[0] if self._knows_threads else self._shown()
        others = () if self._knows_threads else tuple(rank for rank in self.stopped if rank != first)
        order = {first: thread[1] if first == thread[0] else next(iter(self._ranks[first].stopped))}
        order |= {rank: next(iter(self._ranks[rank].stopped)) for rank in others}
        arguments = request.get("arguments") or {}
        asked = {
            rank: {**request, "arguments": {**arguments, "threadId": number}}
            for rank, number in order.items()
        }

        def finish(got: dict[int, Json]) -> list[Effect]:
            frames = [
                frame for rank in order if rank in got for frame in self._stack(rank, order[rank], got[rank])
            ]
            return [self._response(key, request, {"stackFrames": frames, "totalFrames": len(frames)})]

        return self._gather(key, request, asked, finish)

    def _stack(self, rank: int, thread: int, reply: Json) -> list[Json]:
        frames = list((reply.get("body") or {}).get("stackFrames", ()))
        paths = [str((one.get("source") or {}).get("path", "")) for one in frames]
        in_cells = [place for place, path in enumerate(paths) if path.startswith(self._cells)]
        if in_cells:  # the frames after the outermost one of a cell are those that run cells
            frames = frames[: in_cells[-1] + 1]
        one = self._ranks.get(rank)
        if one is None or thread not in one.stopped:
            return []
        if frames:
            one.stopped[thread] = (paths[0], frames[0].get("line", 0), frames[0].get("name", ""))
        name = "{}" if self._knows_threads else f"rank {rank}: {{}}"
        return [
            {
                **frame,
                "id": self._frames.assign(rank, frame["id"]),
                "name": name.format(frame.get("name", "")),
            }
            for frame in frames
        ]

    # -- requests to ranks -----------------------------------------------------------------------------------------------

    @property
    def stopped(self) -> tuple[int, ...]:
        """Return the ranks that have stopped."""
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
        self._open[key] = PendingReplies(request, set(asked), finish)
        effects: list[Effect] = []
        for rank, version in asked.items():
            if rank == LOCAL:
                effects.append(AskLocal(key, version))
            else:
                take = _taker(self, key, rank)
                effects += self._ask(rank, version["command"], version.get("arguments") or {}, take)
        # Without anyone to ask, no answer would finish the request.
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
        """Handle that a rank is ready, or gone: ``attach``, which waits for ranks and not for answers, waits for it no more."""
        effects: list[Effect] = []
        # A copy: `_answered` takes a finished request out of the table.
        for key, gathering in list(self._open.items()):
            if gathering.request.get("command") == "attach":
                effects += self._answered(key, rank, reply)
        return effects

    def _expired(self, event: Expired) -> list[Effect]:
        """Finish a request without the ranks whose time is up. The kernel's own debugger is waited for: it always answers, if only
        when a cell has ended."""
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
        self._open[key] = PendingReplies(request, {LOCAL}, lambda got: self._first(key, request, got))
        return []

    def _first(self, key: int, request: Json, got: dict[int, Json]) -> list[Effect]:
        """Reply with the answer of the kernel's own debugger."""
        if LOCAL in got:
            return [ReplyToFrontend(key, got[LOCAL])]
        return [self._failed(key, request, "the kernel does not answer")]

    def _response(self, key: int, request: Json, body: Json) -> ReplyToFrontend:
        return ReplyToFrontend(key, {**_answer(request), "success": True, "body": body})

    def _failed(self, key: int, request: Json, why: str) -> ReplyToFrontend:
        body = _EMPTY.get(request.get("command", ""), {})
        return ReplyToFrontend(
            key, {**_answer(request), "success": False, "message": why, "body": dict(body)}
        )

    def _event(self, name: str, body: Json) -> Publish:
        self._seq += 1
        return Publish({"type": "event", "seq": self._seq, "event": name, "body": body})


def not_debugged(rank: int, reason: str) -> str:
    """Return the sentence for the user about a rank that can't be debugged."""
    return f"rank {rank} does not stop at breakpoints: {reason}"

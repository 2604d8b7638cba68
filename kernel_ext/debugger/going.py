"""How ranks stop, step and go on."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlab.kernel_ext.debugger.asking import Asking, RankState
from hvdlab.kernel_ext.debugger.events import Effect, Json, Remind, Requested

_ABOUT_FRAMES = frozenset({"scopes", "variables", "evaluate", "setVariable", "setExpression", "completions"})
STEPS = frozenset({"next", "stepIn", "stepOut"})


class Going(Asking):
    """Takes the events of ranks' debug servers, and sends them orders to step and to go on.

    JupyterLab shows the stack of the thread whose ``stopped`` event came last. So one rank is the *selected* one, which the
    user looks at; while it steps, the ``stopped`` events of others are held back.
    """

    def __init__(self, cells: str) -> None:
        super().__init__(cells)
        self._selected = 0
        self._alone = False
        self._stepping: int | None = None  # the selected rank, while it steps
        self._held: list[tuple[int, Json]] = []  # the ``stopped`` events of others meanwhile

    def _shown(self) -> int:
        """The rank that the frontend shows."""
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
        """The selected rank has stepped, or takes long: publish the events of the others that were held back."""
        self._stepping = None
        held, self._held = self._held, []
        events = [self._event("stopped", body) for rank, body in held if rank in self.stopped]
        return list(events) or self._show_again()

    def _beside(self, thread: tuple[int, int]) -> list[tuple[int, int]]:
        """This thread, and those of other ranks that are known to have stopped at the same line."""
        place = self._ranks[thread[0]].stopped[thread[1]]
        return [thread] + [
            (rank, number)
            for rank in self.stopped
            for number, other in self._ranks[rank].stopped.items()
            if rank != thread[0] and place is not None and other == place
        ]

    def _pause(self, event: Requested) -> list[Effect]:
        key, request = event.key, event.request
        meant = self._threads.meant((request.get("arguments") or {}).get("threadId"))
        if meant is None and (event.local_stopped or not self._talking()):
            return []
        pausing = [meant] if meant is not None else [(r, self._ranks[r].main) for r in self._talking()]
        asked = {rank: {**request, "arguments": {"threadId": number}} for rank, number in pausing}
        return self._gather(key, request, asked, lambda got: [self._response(key, request, {})])

    # -- messages of ranks -----------------------------------------------------------------------------------------------

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

    def _stop(self, rank: int, one: RankState, body: Json) -> list[Effect]:
        if not self.stopped and self._stepping is None:
            self._selected = rank
        one.stopped[body.get("threadId", one.main)] = None
        stopped = {key: value for key, value in body.items() if key != "hitBreakpointIds"}
        stopped |= {
            "threadId": self._threads.give(rank, body.get("threadId", one.main)),
            "allThreadsStopped": False,
            "description": f"rank {rank}: {body.get('description') or body.get('reason', 'stopped')}",
        }
        if self._stepping not in (None, rank):
            self._held.append((rank, stopped))
            return []
        before = self._step_over() if self._held else []
        self._stepping = None
        return [*before, self._event("stopped", stopped)]

    def _goes_on(self, rank: int, one: RankState, threads: Iterable[int]) -> list[Effect]:
        effects: list[Effect] = []
        one.going = False
        for thread in threads:
            del one.stopped[thread]
            effects.append(self._continued(rank, thread))
        if effects and not one.stopped:
            self._forget_stacks(rank)
            effects += self._give_up(one)
        return effects + (self._show_again() if effects else [])

    def _give_up(self, one: RankState) -> list[Effect]:
        """Fail questions about frames of a rank that goes on: their answers may never come, as of an endless ``__repr__``."""
        effects: list[Effect] = []
        for seq, (command, take) in list(one.waiting.items()):
            if command in _ABOUT_FRAMES:
                del one.waiting[seq]
                effects += take({"success": False, "message": "that rank goes on"})
        return effects

    def _continued(self, rank: int, thread: int) -> Effect:
        number = self._threads.give(rank, thread)
        return self._event("continued", {"threadId": number, "allThreadsContinued": False})

    def _show_again(self) -> list[Effect]:
        """Publish ``stopped`` again for a rank that has not gone on: JupyterLab empties its frames when any thread goes on."""
        staying = [rank for rank in self.stopped if not self._ranks[rank].going]
        if self._knows_threads or self._stepping is not None or not staying:
            return []
        rank = self._selected if self._selected in staying else staying[0]
        number = self._threads.give(rank, next(iter(self._ranks[rank].stopped)))
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

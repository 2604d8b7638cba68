"""The frames and variables of ranks that have stopped."""

from __future__ import annotations

import ast

from hvdlab.kernel_ext.debugger.choosing import WORDS, Choosing
from hvdlab.kernel_ext.debugger.events import Effect, Json
from hvdlab.kernel_ext.debugger.identifiers import Numbers
from hvdlab.kernel_ext.debugger.variables import shown


class Looking(Choosing):
    """Requests about a frame or a variable of one rank, and the stacks of all that have stopped."""

    def _by_number(self, key: int, request: Json, name: str, numbers: Numbers) -> list[Effect]:
        arguments = request.get("arguments") or {}
        number = arguments.get(name)
        if not numbers.issued(number):
            return []
        meant = numbers.meant(number)
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
        """The body of an answer with the numbers of variables that the frontend knows."""
        body = dict(body)
        if "variables" in body:
            body["variables"] = [one for one in body["variables"] if shown(one.get("name", ""))]
        for name in ("variables", "scopes"):
            if name in body:
                body[name] = [self._renumbered(rank, one) for one in body[name]]
        if body.get("variablesReference"):
            body["variablesReference"] = self._variables.give(rank, body["variablesReference"])
        return body

    def _copy(self, key: int, request: Json, rank: int, frame: int) -> list[Effect]:
        arguments = request["arguments"]
        names = [arguments.get("dstVariableName", ""), arguments.get("srcVariableName", "")]
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            return [self._failed(key, request, "these are no names of variables")]
        inner = {"expression": f"globals()[{names[0]!r}]", "value": names[1], "frameId": frame}
        return self._pass_on(key, {**request, "command": "setExpression"}, rank, inner)

    def _rich(self, key: int, request: Json, rank: int, frame: int) -> list[Effect]:
        """A variable as a cell would show it, in the same way as the kernel's own debugger does it."""
        name = request["arguments"].get("variableName", "")
        if not name.isidentifier():
            return [self._response(key, request, {"data": {}, "metadata": {}})]
        code = f"get_ipython().display_formatter.format({name})"
        inner = {"expression": code, "frameId": frame, "context": "clipboard"}
        asked = {rank: {**request, "command": "evaluate", "arguments": inner}}

        def finish(got: dict[int, Json]) -> list[Effect]:
            try:
                data, metadata = ast.literal_eval(got[rank]["body"]["result"])
            except (KeyError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
                return [self._failed(key, request, f"rank {rank} can't show it")]
            return [self._response(key, request, {"data": data, "metadata": metadata})]

        return self._gather(key, request, asked, finish)

    def _stacks(self, key: int, request: Json, thread: tuple[int, int]) -> list[Effect]:
        """The stack of a thread; for a frontend that asks for no threads those of all ranks that have stopped."""
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
            {**frame, "id": self._frames.give(rank, frame["id"]), "name": name.format(frame.get("name", ""))}
            for frame in frames
        ]

"""Which ranks the debugger's buttons move: all that have stopped, or only the one that the user looks at."""

from __future__ import annotations

from hvdlab.kernel_ext.debugger.events import Effect, Json
from hvdlab.kernel_ext.debugger.going import Going

SCOPE = "hvdlab/scope"
"""A request of our own. ``alone`` among its arguments chooses; the answer has the present choice.

A frontend that has sent it gets an event of this name, with the same body, after each change.
"""
WORDS = {"%one": True, "%all": False}
"""Expressions that choose, for frontends that have no button for it."""
NOBODY: Json = {"alone": False, "rank": None, "stoppedRanks": []}


class Choosing(Going):
    """The choice, and what the frontend knows of it."""

    def __init__(self, cells: str) -> None:
        super().__init__(cells)
        self._sent_scope: Json | None = None  # what a frontend that has asked knows

    def _scope(self) -> Json:
        """Whether the buttons move one rank only, which one that is, and which ranks have stopped."""
        rank = self._shown() if self.stopped else None
        return {"alone": self._alone, "rank": rank, "stoppedRanks": list(self.stopped)}

    def _answer_scope(self, key: int, request: Json, alone: object) -> list[Effect]:
        if isinstance(alone, bool):
            self._alone = alone
        self._sent_scope = self._scope()
        return [self._response(key, request, self._sent_scope)]

    def _tell_scope(self) -> list[Effect]:
        """Tell a frontend that has asked what has changed; not while ranks have only begun a step."""
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

"""A notebook that remembers which messages it got."""

from __future__ import annotations

from typing import Any


class Recorder:
    """Publisher that remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def stream(self, name: str, text: str) -> None:
        self.sent.append((name, text))

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
    ) -> None:
        self.sent.append(("update" if update else "display", display_id, data))

    def clear(self, wait: bool) -> None:
        self.sent.append(("clear", wait))

    def areas(self) -> dict[str, Any]:
        """Return the final contents of each area."""
        shown: dict[str, Any] = {}
        for message in self.sent:
            if message[0] == "display":
                assert message[1] not in shown
                shown[message[1]] = message[2]
            elif message[0] == "update":
                assert message[1] in shown
                shown[message[1]] = message[2]
        return shown


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

"""The questions of a rank that makes a group, on an engine whose mail a test delivers, or loses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hvdlab.torch.c10d.world import C10dWorld
from support.patience import HOUR, PATIENCE


class _Core:
    """Handle of a process set that was added at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        return SimpleNamespace(process_set=7)

    def outcome(self) -> tuple[Any, None]:
        return self.wait(), None


class _Engine:
    """Engine of rank 0 of three, which keeps the mail that is posted."""

    closed, rank, living = False, 0, (0, 1, 2)
    settings = SimpleNamespace(start_timeout=HOUR)

    def __init__(self) -> None:
        self.posted: list[tuple[str, bytes, list[int]]] = []
        self.asked = threading.Event()
        self.mail: dict[str, Callable[[int, bytes], None]] = {}
        self.reconnections: list[Callable[[], None]] = []

    def ranks(self) -> tuple[int, ...]:
        return self.living

    def post(self, topic: str, body: bytes, to: list[int]) -> None:
        self.posted.append((topic, body, to))
        self.asked.set()

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        self.mail[topic] = callback

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        self.reconnections.append(callback)

    def on_world(self, callback: object) -> None:
        """Drop it: no rank leaves this world."""

    on_leave = on_native_waits = on_cell_failed = on_abort = on_world

    def generation(self) -> int:
        return 0

    def processes(self) -> tuple[int, tuple[tuple[int, str], ...]]:
        return 0, tuple((rank, "process") for rank in self.living)

    def submit(self, request: object) -> _Core:
        return _Core()

    def knows_process_set(self, number: int) -> bool:
        return True


def test_question_lost_with_the_coordinator_is_asked_again() -> None:
    engine = _Engine()
    world = C10dWorld(engine)  # type: ignore[arg-type]
    found: list[int] = []
    making = threading.Thread(target=lambda: found.append(world.process_set([0, 1])))
    making.start()
    try:
        assert engine.asked.wait(PATIENCE)
        ask, body, to = engine.posted[0]
        answer = ask.replace("ask", "answer")
        assert to == [1, 2]
        engine.mail[answer](1, body)
        for reconnected in engine.reconnections:
            reconnected()
        assert engine.posted[1:] == [(ask, body, [2])]  # rank 1 has answered
    finally:
        for rank in (1, 2):
            engine.mail[answer](rank, body)
        making.join(PATIENCE)
    assert found == [7]
    for reconnected in engine.reconnections:
        reconnected()
    assert len(engine.posted) == 2  # nothing waits any more

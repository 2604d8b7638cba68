"""Children of a fork server that can end while a thread examines them."""

from __future__ import annotations

import pytest

from hvdlab.launch.forkserver import client
from hvdlab.launch.forkserver.messages import Forked


def test_a_child_may_end_while_they_are_taken_into_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    children = {number: Forked(number, 1000 + number) for number in range(3)}
    seen: list[int] = []

    def opened(pid: int, started: int) -> int:
        seen.append(pid)
        children.pop(2, None)  # the work of the thread that reads of its end
        return -1

    monkeypatch.setattr(client, "open_process", opened)
    client.OrphanWatcher().watch(children.values())
    assert seen == [1000, 1001, 1002]

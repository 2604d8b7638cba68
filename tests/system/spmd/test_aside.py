"""Which messages are answered beside a cell, message by message and without a kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import zmq
from jupyter_client.session import Session

from hvdlab.kernel_ext.kernel.kernel import BusyReplies

SESSION = Session(key=b"secret")


def message(kind: str, **content: Any) -> list[zmq.Frame]:
    """Return a request as it comes from a client."""
    message = SESSION.msg(kind, content)
    return [zmq.Frame(b"client"), *(zmq.Frame(part) for part in SESSION.serialize(message))]


class MainThread:
    """In the place of ipykernel's class: messages for the main thread wait until the test lets it handle them.

    Attributes:
        waiting: Work handed to the main thread. handled: Work that it has done.
    """

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.handled: list[Any] = []

    async def shell_channel_thread_main(self, msg: Any) -> None:
        self.waiting.append(msg)

    async def dispatch_shell(self, msg: Any, /, **how: Any) -> None:
        self.handled.append(msg)

    def _topic(self, topic: str) -> bytes:
        return topic.encode()


class Kernel(BusyReplies, MainThread):
    """Kernel that answers all questions, and keeps its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.session = SESSION
        self.sent: list[str] = []
        self.iopub_socket = self.shell_stream = None

    def answer_aside(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"matches": [content["code"]]}

    async def receive(self, msg: Any) -> None:
        """Take a message and let the answer, if there is one, be sent."""
        await self.shell_channel_thread_main(msg)
        await asyncio.gather(*self._answering)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel()
    monkeypatch.setattr(SESSION, "send", lambda stream, kind, *args, **how: made.sent.append(kind))
    yield made
    made._helper.shutdown()


def test_a_question_that_comes_before_the_main_thread_has_begun_the_cell_is_answered_at_once(
    kernel: Kernel,
) -> None:
    cell, question = (
        message("execute_request", code="x"),
        message("complete_request", code="on_r", cursor_pos=4),
    )

    async def scenario() -> None:
        await kernel.receive(cell)
        await kernel.receive(question)

    asyncio.run(scenario())
    assert kernel.waiting == [cell]
    assert "complete_reply" in kernel.sent


def test_a_question_while_no_cell_waits_is_the_main_threads(kernel: Kernel) -> None:
    cell, question = (
        message("execute_request", code="x"),
        message("complete_request", code="on_r", cursor_pos=4),
    )

    async def scenario() -> None:
        await kernel.receive(cell)
        await kernel.dispatch_shell(cell)
        await kernel.receive(question)

    asyncio.run(scenario())
    assert kernel.handled == [cell]
    assert kernel.waiting == [cell, question]
    assert kernel.sent == []


def test_a_question_between_two_cells_is_answered_until_the_last_has_ended(kernel: Kernel) -> None:
    first, second = (message("execute_request", code=code) for code in "ab")
    question = message("complete_request", code="on_r", cursor_pos=4)

    async def scenario() -> None:
        await kernel.receive(first)
        await kernel.receive(second)
        await kernel.dispatch_shell(first)
        await kernel.receive(question)

    asyncio.run(scenario())
    assert "complete_reply" in kernel.sent
    assert question not in kernel.waiting


def test_question_without_its_code_waits_for_the_main_thread(kernel: Kernel) -> None:
    cell, question = message("execute_request", code="x"), message("complete_request", cursor_pos=4)

    async def scenario() -> None:
        await kernel.receive(cell)
        await kernel.receive(question)

    asyncio.run(scenario())
    assert kernel.waiting == [cell, question]
    assert kernel.sent == []


def test_end_of_a_subshells_cell_leaves_main_cell_busy(kernel: Kernel) -> None:
    cell, question = (
        message("execute_request", code="x"),
        message("complete_request", code="on_r", cursor_pos=4),
    )

    async def scenario() -> None:
        await kernel.receive(cell)
        with kernel.running({"header": {"msg_id": "main"}}):
            with kernel.running({"header": {"msg_id": "aside", "subshell_id": "s"}}):
                pass
            await kernel.receive(question)

    asyncio.run(scenario())
    assert kernel.sent == ["status", "complete_reply", "status", "status"], (
        "the last state is that of the cell"
    )

"""A kernel whose cells ask for input, and a user that answers."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from support.jupyter.live_kernel import Cell, LiveKernel

Answer = str | Callable[[], None]
"""What is typed, or done instead of typing."""


class PromptingKernel(LiveKernel):
    """Kernel whose input requests are answered."""

    def dialogue(self, code: str, *answers: Answer, timeout: float = 120) -> tuple[Cell, list[str]]:
        """Run a cell, and give these answers to its prompts. Returns the prompts as well.

        Fails if it asks for more, or for less.
        """
        cell = Cell(self.client.execute(code, allow_stdin=True), time.monotonic())
        self.cells[cell.msg_id] = cell
        prompts: list[str] = []
        left = list(answers)
        deadline = time.monotonic() + timeout
        while not cell.ended:
            assert time.monotonic() < deadline, (prompts, cell.messages)
            if self.client.iopub_channel.msg_ready():
                self._take(self.client.get_iopub_msg(timeout=5))
                continue
            try:
                request = self.client.get_stdin_msg(timeout=0.05)
            except queue.Empty:
                continue
            prompts.append(request["content"]["prompt"])
            assert left, f"it asks once more: {prompts}, {cell.messages[-5:]}"
            answer = left.pop(0)
            if callable(answer):
                answer()
            else:
                self.client.input(answer)
        self.finish(cell, timeout)
        assert not left, f"it asked for {prompts} only, {cell.messages}"
        return cell, prompts


def names(prompts: Sequence[str]) -> list[str]:
    """Return the ranks that asked, in order."""
    return [prompt.split("]")[0].removeprefix("[") for prompt in prompts]


def plain(value: Any) -> str:
    """Return a text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(value))

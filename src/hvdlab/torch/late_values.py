"""Numbers that a GPU has yet to compute: they are recorded later, since waiting for them would stop the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

MOST_WAITING = 64
"""Numbers that may wait for a GPU; with one more, the training waits for the oldest."""

Record = Callable[[str, float, int, int], None]


class Done(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _Late(NamedTuple):
    name: str
    copy: torch.Tensor
    done: Done
    step: int
    time_ns: int


class LateValues:
    """Records numbers once a GPU has computed them, with the step and the time at which they were put here.

    Args:
        record: Called with the name, the value, the step, and the time in ns.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._waiting: deque[_Late] = deque()

    def put(self, name: str, value: torch.Tensor, step: int, time_ns: int) -> None:
        """Record a tensor with one element: at once, or later if it is on a CUDA device."""
        if value.device.type != "cuda":
            self._record(name, float(value.item()), step, time_ns)
            return
        copy = value.detach().to("cpu", non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
        done.record(torch.cuda.current_stream(value.device))
        self.wait_for(name, copy, done, step, time_ns)

    def wait_for(self, name: str, copy: torch.Tensor, done: Done, step: int, time_ns: int) -> None:
        """Record the element of ``copy``, a tensor in host memory, once the event ``done`` has come."""
        self._waiting.append(_Late(name, copy, done, step, time_ns))
        if len(self._waiting) > MOST_WAITING:
            self._waiting[0].done.synchronize()
        self.take()

    def take(self) -> None:
        """Record the numbers that are there by now, without waiting."""
        while self._waiting and self._waiting[0].done.query():
            self._one(self._waiting.popleft())

    def finish(self) -> None:
        """Wait for the remaining numbers and record them."""
        while self._waiting:
            late = self._waiting.popleft()
            late.done.synchronize()
            self._one(late)

    def _one(self, late: _Late) -> None:
        self._record(late.name, float(late.copy.item()), late.step, late.time_ns)

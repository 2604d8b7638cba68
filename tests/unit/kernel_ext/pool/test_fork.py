"""Waiting for the fork server's reports of ipyparallel's controller."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from concurrent.futures import Future
from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.ipyparallel.fork_launchers import outcome_of


def test_a_failure_after_the_wait_was_given_up_is_not_complained_of() -> None:
    """A pool is stopped while its controller comes up."""
    complaints: list[dict[str, Any]] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        listening: Future[None] = Future()
        waiting = asyncio.create_task(outcome_of(listening))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        listening.set_exception(RuntimeError("it was ended"))
        for _ in range(3):
            await asyncio.sleep(0)
        del waiting, listening
        gc.collect()

    asyncio.run(play())
    assert complaints == []


def test_the_outcome_is_that_of_the_future() -> None:
    async def play(future: Future[int]) -> int:
        return int(await outcome_of(future))

    good: Future[int] = Future()
    good.set_result(7)
    assert asyncio.run(play(good)) == 7
    bad: Future[int] = Future()
    bad.set_exception(RuntimeError("it was ended"))
    with pytest.raises(RuntimeError, match="it was ended"):
        asyncio.run(play(bad))

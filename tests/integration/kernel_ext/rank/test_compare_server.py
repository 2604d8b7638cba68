"""Every question about an examination is answered, also one that comes in the moment of its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from hvdlab.collectives.engine.engine import Engine
from hvdlab.kernel_ext.rank.compare import OVER, CompareServer
from hvdlab.kernel_ext.wire.codec import TO_POOL, ToPool, decode_to_pool
from hvdlab.kernel_ext.wire.compare import AskLeaves, ComparisonOpened, LeafList, OpenComparison
from hvdlab.kernel_ext.wire.values import Acked


def test_a_question_that_comes_with_the_end_is_answered() -> None:
    answers: list[ToPool] = []

    async def scenario() -> None:
        class LoneEngine:
            rank, local_size = 0, 1

            def post(self, topic: str, body: bytes) -> None:
                assert topic == TO_POOL
                answer = decode_to_pool(body)
                answers.append(answer)
                if isinstance(answer, ComparisonOpened):
                    examining.ask(AskLeaves(8, 5, 0))
                elif isinstance(answer, LeafList):
                    # As from another thread, while the rank is still busy with the question before.
                    examining.release(5)
                    examining.ask(AskLeaves(9, 5, 0))

        shell = SimpleNamespace(user_ns={"x": [1, 2, 3]}, user_global_ns={})
        examining = CompareServer(shell, asyncio.get_running_loop(), cast(Engine, LoneEngine()))
        await examining.run(OpenComparison(5, "x"))
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert [type(answer) for answer in answers] == [ComparisonOpened, LeafList, Acked]
    last = answers[-1]
    assert isinstance(last, Acked)
    assert (last.ticket, last.error) == (9, OVER)

"""Any mail to a rank, and any failure there: the rank continues, and answers mail that has a ticket."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any, get_args

import pytest

from hvdlab.kernel_ext.rank import values
from hvdlab.kernel_ext.wire import codec
from hvdlab.kernel_ext.wire.cells import RunCell
from hvdlab.kernel_ext.wire.status import AskStatus, Status
from hvdlab.kernel_ext.wire.values import Acked, PushValue, ReadChunk, ReleaseTransfer
from support.fuzz.payload import make
from support.patience import eventually

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank

KINDS = tuple(kind for kind in get_args(codec.ToRank) if kind is not RunCell)


def test_a_question_that_raises_is_answered_with_an_error(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(question: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(rank.agent._outgoing, "read", fails)

    def script(pool: Pool) -> None:
        assert "RuntimeError: broken" in pool.ask(ReadChunk(7, 5, 0, 0, 10), Acked).error
        assert pool.ask(AskStatus(8), Status).ticket == 8

    rank.play(script)
    assert [str(error) for error in rank.engine.errors] == ["broken"]
    rank.engine.errors.clear()


def test_a_question_between_cells_that_raises_does_not_end_the_rank(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    rank.loop.set_exception_handler(lambda loop, context: shown.append(context))
    monkeypatch.setattr(values, "push", values.pull)

    def script(pool: Pool) -> None:
        assert "hvdlab failed in this rank" in pool.ask(PushValue(7, ("x",), (b"",)), Acked).error
        assert pool.run("print('alive')").text() == "alive\n"

    rank.play(script)
    assert [context["message"] for context in shown] == ["hvdlab could not answer the notebook"]


@pytest.mark.parametrize("seed", range(4))
def test_any_mail_of_the_right_types_is_survived(rank: Rank, seed: int) -> None:
    chance = random.Random(seed)
    rank.loop.set_exception_handler(lambda loop, context: None)

    def script(pool: Pool) -> None:
        transfers: set[Any] = set()
        for _ in range(200):
            mail = make(chance.choice(KINDS), chance)
            transfers |= {getattr(mail, "transfer_id", None), getattr(mail, "ticket", None)} - {None}
            pool.engine.mail(mail)
        for transfer_id in transfers:
            pool.engine.mail(ReleaseTransfer(transfer_id))
        assert pool.run("print('alive')").text() == "alive\n"

    rank.play(script)
    # Answers to questions that came while a cell ran: nothing waits for these threads, and a slow machine needs long for the last ones.
    eventually(lambda: not any(thread.name == "hvdlab-looking" for thread in threading.enumerate()))
    rank.engine.errors.clear()  # they were answered

"""Messages find the methods that handle them, and every message has one."""

from __future__ import annotations

from typing import get_args

import pytest

from hvdlab.kernel_ext.notebook.cells.cell_events import Event
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.rank.agent import RankAgent
from hvdlab.kernel_ext.wire.channel import HandlerTable, Payload, RankReply, RankRequest
from hvdlab.kernel_ext.wire.codec import ToPool, ToRank
from hvdlab.kernel_ext.wire.status import AskNames, AskStack


def test_a_rank_handles_every_message_of_a_pool() -> None:
    assert RankAgent._control.kinds == set(get_args(ToRank))


def test_a_pool_handles_every_message_of_a_rank() -> None:
    replies = {kind for kind in get_args(ToPool) if issubclass(kind, RankReply)}
    assert CellDispatcher._mail.kinds == set(get_args(ToPool)) - replies


def test_a_cell_handles_every_event() -> None:
    assert CellState._events.kinds == set(get_args(Event))


def test_a_rank_s_main_thread_answers_requests_alone() -> None:
    assert all(issubclass(kind, RankRequest) for kind in RankAgent._main.kinds)


def test_a_message_goes_to_the_method_for_its_class() -> None:
    class Handler:
        table = HandlerTable()

        @table.handles(AskNames, AskStack)
        def handle(self, message: Payload, rank: int) -> tuple[int, Payload]:
            return rank, message

    assert Handler.table.call(Handler(), AskNames(1), 3) == (3, AskNames(1))


def test_a_class_of_messages_has_one_method() -> None:
    table = HandlerTable()
    table.handles(AskNames)(print)
    with pytest.raises(AssertionError, match="AskNames"):
        table.handles(AskNames)(print)

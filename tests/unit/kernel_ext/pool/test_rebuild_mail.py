"""Ranks' reports about cells arrive once, in order and whole, however much mail is lost with coordinators."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.cells.dispatch import MessageFate, ReceiveWindow
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.rank.output_log import OutputLog
from hvdlab.kernel_ext.wire.cells import CellDone, Output, Stream
from hvdlab.kernel_ext.wire.codec import TO_POOL, decode_to_pool, decode_to_rank
from hvdlab.kernel_ext.wire.values import Acked, PushValue
from support.fakes.posting_engine import PostingEngine
from support.patience import PATIENCE

CELL = "c"


class Link:
    """A rank's cell, the pool's view of it, and the lossy way between them."""

    def __init__(self) -> None:
        self.to_pool: deque[bytes] = deque()
        self.to_rank: deque[tuple[str, int, int]] = deque()
        self.sent = OutputLog(PostingEngine(self._post))
        self.arrivals = ReceiveWindow([0])
        self.text = ""
        self.done: CellDone | None = None
        self.written = ""
        self._sent_done = False
        assert self.sent.register(CELL)

    def _post(self, topic: str, body: bytes) -> None:
        assert topic == TO_POOL
        self.to_pool.append(body)

    def write(self, size: int) -> None:
        before = len(self.written)
        text = "".join(chr(97 + (before + i) % 26) for i in range(size))
        self.written += text
        self.sent.output(CELL, [Stream("stdout", text)], size)

    def finish(self) -> None:
        self.sent.done(CellDone(CELL, None, 0.0))

    def deliver(self, count: int) -> None:
        """Deliver this many messages to the pool."""
        for _ in range(min(count, len(self.to_pool))):
            message = decode_to_pool(self.to_pool.popleft())
            if isinstance(message, Output):
                verdict = self.arrivals.output(0, message)
                if verdict is MessageFate.TAKE:
                    self.text += "".join(c.text for c in message.chunks if isinstance(c, Stream))
            else:
                assert isinstance(message, CellDone)
                verdict = self.arrivals.done(0, message)
                if verdict is MessageFate.TAKE:
                    assert self.done is None
                    self.done = message
            if verdict is MessageFate.ASK:
                self.ask()

    def ask(self) -> None:
        found = self.arrivals.resend_position(0)
        self.to_rank.append((CELL, *found) if found else ("", 0, 0))

    def take(self) -> None:
        """Send the pool's acknowledgement of the mail that it has."""
        self.arrivals.acknowledged(0, len(self.text))
        self.sent.acknowledge(CELL, len(self.text))

    def hear(self) -> None:
        """Deliver the pool's requests to the rank."""
        while self.to_rank:
            cell, received, taken = self.to_rank.popleft()
            self.sent.resend([(cell, received, taken)] if cell else [])

    def lose(self, back: int, forth: bool) -> None:
        """Lose the last messages with the coordinator, and those written until the pool is back."""
        while len(self.to_pool) > back:
            self.to_pool.pop()
        if forth:
            self.to_rank.clear()

    def reconnect(self) -> None:
        self.ask()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 30)),
        st.tuples(st.just("deliver"), st.integers(1, 5)),
        st.tuples(st.just("lose"), st.integers(0, 3)),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.just("hear"), st.just(0)),
        st.tuples(st.just("finish"), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_output_is_whole_and_in_order_after_any_losses(steps: list[tuple[str, int]]) -> None:
    link = Link()
    finished = False
    for step, number in steps:
        if step == "write" and not finished:
            link.write(number)
        elif step == "deliver":
            link.deliver(number)
        elif step == "lose":
            link.lose(number, forth=True)
            link.reconnect()
        elif step == "take":
            link.take()
        elif step == "hear":
            link.hear()
        elif step == "finish" and not finished:
            finished = True
            link.finish()
        assert link.written.startswith(link.text)
    if not finished:
        link.finish()
    link.lose(0, forth=True)
    link.reconnect()
    link.hear()
    link.deliver(10_000)
    assert link.text == link.written
    assert link.done is not None
    assert link.done.total == len(link.written)


@given(STEPS)
def test_a_gap_is_noticed_without_being_told_of_a_loss(steps: list[tuple[str, int]]) -> None:
    link = Link()
    finished = False
    for step, number in steps:
        if step == "write" and not finished:
            link.write(number)
        elif step == "deliver":
            link.deliver(number)
        elif step == "lose" and not finished:
            link.lose(number, forth=False)
        elif step == "take":
            link.take()
        elif step == "hear":
            link.hear()
        elif step == "finish" and not finished:
            finished = True
            link.finish()
        assert link.written.startswith(link.text)
    if not finished:
        link.finish()
    while link.to_pool or link.to_rank:
        link.deliver(10_000)
        link.hear()
    assert link.text == link.written
    assert link.done is not None


def test_what_was_taken_or_settled_is_not_kept() -> None:
    link = Link()
    for _ in range(100):
        link.write(1000)
        link.deliver(1)
        link.take()
    link.sent.resend([(CELL, 0, 0)])
    (gap,) = link.to_pool  # one sentence instead of the output that the pool has received
    assert len(gap) < 200
    link.deliver(1)
    assert link.text == link.written
    link.finish()
    link.to_pool.clear()
    link.sent.discard_cell(CELL)
    link.sent.resend([(CELL, 0, 0)])
    assert not link.to_pool


def test_a_cell_that_comes_twice_is_known_until_nobody_wants_it() -> None:
    link = Link()
    assert not link.sent.register(CELL)
    link.finish()
    assert not link.sent.register(CELL)
    link.sent.resend([])
    assert link.sent.register(CELL)


def test_a_question_is_asked_again_of_those_who_have_not_answered() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    class Mail:
        def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None:
            question = decode_to_rank(body)
            assert isinstance(question, PushValue)
            asked.append((question.ticket, tuple(ranks)))
            if len(asked) == 1:
                questions.resolve(1, Acked(question.ticket))
                questions.resend_pending()
                questions.resolve(0, Acked(question.ticket))

    questions = RankRequests(Mail())
    answers = questions.ask(lambda ticket: PushValue(ticket, (), ()), [0, 1], Deadline(PATIENCE))
    assert set(answers) == {0, 1}
    assert [ranks for _, ranks in asked] == [(0, 1), (0,)]
    assert asked[0][0] == asked[1][0]

"""Which ranks are asked to join ipyparallel's controller, and which answers count."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hvdlab.kernel_ext.notebook.ipyparallel.cluster import TRIES, EngineRegistration


class Ranks:
    """Ranks that are asked, and answer when the test lets them."""

    def __init__(self, count: int, at_once: int) -> None:
        self.asked: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str]] = []
        self.joining = EngineRegistration(self, at_once)
        self.joining.add(range(count))
        self._last: dict[int, str] = {}

    def request_engine(self, rank: int, request: str) -> None:
        number, _, connection = request.partition("\n")
        self.asked.append((rank, connection))
        self._last[rank] = number

    def engine_failed(self, rank: int, why: str) -> None:
        self.failed.append((rank, why))

    def answer(self, rank: int, failure: str = "", number: str | None = None) -> bool:
        return self.joining.resolve(rank, f"{number or self._last[rank]}\n{failure}")

    def number(self, rank: int) -> str:
        return self._last[rank]


def test_ranks_join_one_after_the_other_once_the_controller_is_up() -> None:
    ranks = Ranks(3, at_once=1)
    assert ranks.asked == []
    ranks.joining.set_connection("{}")
    assert ranks.asked == [(0, "{}")]
    assert ranks.answer(0)
    assert ranks.asked == [(0, "{}"), (1, "{}")]
    ranks.joining.remove(1)
    assert ranks.asked == [(0, "{}"), (1, "{}"), (2, "{}")]
    assert not ranks.answer(1)
    assert ranks.joining.joined == {0}


def test_all_ranks_join_again_when_another_controller_is_up() -> None:
    ranks = Ranks(2, at_once=1)
    ranks.joining.set_connection("first")
    ranks.answer(0)
    earlier = ranks.number(1)
    ranks.joining.set_connection("")
    assert ranks.joining.joined == set()
    ranks.joining.set_connection("second")
    assert not ranks.answer(1, number=earlier)
    for rank in (0, 1):
        assert ranks.answer(rank)
    assert ranks.asked[2:] == [(0, "second"), (1, "second")]
    assert ranks.joining.joined == {0, 1}


def test_an_answer_that_never_comes_holds_up_only_that_controller() -> None:
    ranks = Ranks(2, at_once=1)
    ranks.joining.set_connection("first")
    ranks.joining.set_connection("second")  # rank 0's answer to the first was lost
    assert ranks.answer(0)
    assert ranks.answer(1)
    assert ranks.joining.joined == {0, 1}


def test_a_rank_that_could_not_join_tries_again_after_the_others_and_then_it_is_said() -> None:
    ranks = Ranks(2, at_once=1)
    ranks.joining.set_connection("{}")
    assert not ranks.answer(0, "no answer")
    assert ranks.answer(1)
    for _ in range(TRIES - 1):
        assert ranks.failed == []
        assert not ranks.answer(0, "no answer")
    assert ranks.failed == [(0, "no answer")]
    assert [rank for rank, _ in ranks.asked] == [0, 1, *[0] * (TRIES - 1)]
    ranks.joining.set_connection("second")
    assert ranks.answer(0)
    assert ranks.joining.joined == {0}


class Schedules(RuleBasedStateMachine):
    """Controllers, ranks and coordinators come and go; mail comes late, twice, or is lost with a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.joining = EngineRegistration(self, at_once=2)
        self.controllers = 0
        self.up = ""
        self.ranks: dict[int, int] = {}  # each with the number of its process
        self.processes = 0
        self.requests: dict[int, deque[tuple[int, str]]] = defaultdict(deque)
        self.answers: deque[tuple[int, int, str]] = deque()
        self.member_of: dict[int, str] = {}  # process to the controller that it is registered with
        self.given_up: set[int] = set()

    def request_engine(self, rank: int, request: str) -> None:
        if rank in self.ranks:
            self.requests[rank].append((self.ranks[rank], request))

    def engine_failed(self, rank: int, why: str) -> None:
        self.given_up.add(rank)

    @rule()
    def controller_starts(self) -> None:
        self.controllers += 1
        self.up = f"controller {self.controllers}"
        self.given_up.clear()
        self.joining.set_connection(self.up)

    @rule()
    def controller_dies(self) -> None:
        self.up = ""
        self.joining.set_connection("")

    @rule(rank=st.integers(0, 3))
    def rank_starts(self, rank: int) -> None:
        if rank not in self.ranks:
            self.processes += 1
            self.ranks[rank] = self.processes
            self.joining.add([rank])

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def rank_dies(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.ranks)))
        del self.ranks[rank]
        self.requests[rank].clear()
        self.given_up.discard(rank)
        self.joining.remove(rank)

    @rule(rank=st.integers(0, 3), works=st.booleans())
    def rank_handles_a_request(self, rank: int, works: bool) -> None:
        if not self.requests[rank]:
            return
        process, request = self.requests[rank].popleft()
        number, _, connection = request.partition("\n")
        if works and connection == self.up:
            self.member_of[process] = connection
            self.answers.append((rank, process, f"{number}\n"))
        else:
            self.answers.append((rank, process, f"{number}\nno answer"))

    @rule(again=st.booleans())
    def an_answer_comes(self, again: bool) -> None:
        if self.answers:
            rank, process, answer = self.answers.popleft()
            if again:
                self.answers.append((rank, process, answer))
            if self.joining.resolve(rank, answer):
                assert self.ranks[rank] == process

    @rule(answers_too=st.booleans())
    def coordinator_is_replaced(self, answers_too: bool) -> None:
        for waiting in self.requests.values():
            waiting.clear()
        if answers_too:
            self.answers.clear()
        self.joining.resend_pending()

    @invariant()
    def who_has_joined_is_a_member_of_the_controller_that_is_up(self) -> None:
        for rank in self.joining.joined:
            assert self.up
            assert self.member_of[self.ranks[rank]] == self.up

    def teardown(self) -> None:
        """Check that all ranks have joined once all is quiet."""
        if not self.up:
            self.controller_starts()
        for _ in range(1000):
            if not any(self.requests.values()) and not self.answers:
                break
            for rank in range(4):
                self.rank_handles_a_request(rank, works=True)
            self.an_answer_comes(again=False)
        assert self.joining.joined == set(self.ranks) - self.given_up


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

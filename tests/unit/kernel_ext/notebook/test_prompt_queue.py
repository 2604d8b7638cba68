"""Order and owner of prompts, and the meaning of a typed line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.kernel_ext.notebook.stdin import (
    GATHER,
    RETURN,
    Answer,
    PromptDesk,
    PromptQueue,
    SendLine,
    ShowNotice,
    Switch,
    understand,
)
from hvdlab.kernel_ext.wire.cells import DEBUGGER, INPUT, PromptReply, PromptRequest


def ask(number: int, kind: str = DEBUGGER, prompt: str = "ipdb> ") -> PromptRequest:
    return PromptRequest("c", number, kind, prompt)


def due(queue: PromptQueue, now: float) -> int | None:
    question = queue.next_prompt(now)
    return None if question is None else question.rank


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("p x", SendLine((3,), "p x")),
        ("", SendLine((3,), "")),
        ("@2", Switch(2)),
        ("@?", ShowNotice()),
        ("all: p x.shape", SendLine((2, 3), "p x.shape")),
        ("2-3: continue", SendLine((2, 3), "continue")),
        ("2, 3:next", SendLine((2, 3), "next")),
        ("x = {1: 2}", SendLine((3,), "x = {1: 2}")),
        ("def f(): pass", SendLine((3,), "def f(): pass")),
        ("@property", SendLine((3,), "@property")),
    ],
)
def test_what_a_line_means(line: str, command: object) -> None:
    assert understand(line, 3, (0, 2, 3), (2, 3)) == command


@pytest.mark.parametrize("line", ["@7", "1: next", "0-1: c", "0-99999999999: c"])
def test_ranks_that_are_not_at_a_prompt_are_named(line: str) -> None:
    command = understand(line, 3, (0, 2, 3), (2, 3))
    assert isinstance(command, ShowNotice)
    assert "not at a prompt" in command.text


def test_those_that_come_together_are_asked_for_together_lowest_first() -> None:
    queue = PromptQueue()
    queue.prompt_asked(2, ask(1), 0.0)
    queue.prompt_asked(1, ask(1), GATHER / 2)
    assert due(queue, GATHER) is None
    assert queue.deadline == GATHER / 2 + GATHER
    assert due(queue, GATHER / 2 + GATHER) == 1
    question = queue.next_prompt(10)
    assert question is not None
    assert queue.label(question) == "[rank 1] (others wait, @? tells) ipdb> "


def test_the_rank_that_was_answered_is_asked_again_if_it_comes_back_soon() -> None:
    queue = PromptQueue()
    queue.prompt_asked(1, ask(1), 0.0)
    queue.prompt_asked(2, ask(1), 0.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    assert queue.answered(question, "@2", 1.0) == ([], "")
    question = queue.next_prompt(1.0)
    assert question is not None
    assert queue.answered(question, "next", 1.0) == ([Answer(2, PromptReply(1, "next"))], "")
    assert due(queue, 1.0) is None
    queue.prompt_asked(2, ask(2), 1.2)
    assert due(queue, 1.2) == 2  # at once
    question = queue.next_prompt(2.0)
    assert question is not None
    queue.answered(question, "continue", 2.0)
    assert due(queue, 2.0 + RETURN) == 1  # it does not come back


def test_all_means_those_with_the_same_kind_of_prompt() -> None:
    queue = PromptQueue()
    queue.prompt_asked(0, ask(1, INPUT, "name? "), 0.0)
    queue.prompt_asked(1, ask(1), 0.0)
    queue.prompt_asked(2, ask(1), 0.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    queue.answered(question, "@1", 1.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    answers, _ = queue.answered(question, "all: c", 1.0)
    assert [answer.rank for answer in answers] == [1, 2]
    assert queue.ranks == (0,)


def test_a_single_plain_question_takes_any_line_as_it_is() -> None:
    queue = PromptQueue()
    queue.prompt_asked(0, ask(1, INPUT, "mail? "), 0.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    assert queue.answered(question, "@2", 1.0) == ([Answer(0, PromptReply(1, "@2"))], "")


def test_a_question_that_comes_again_gets_the_answer_it_had() -> None:
    queue = PromptQueue()
    queue.prompt_asked(0, ask(5), 0.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    queue.answered(question, "n", 1.0)
    assert queue.prompt_asked(0, ask(5), 2.0) == [Answer(0, PromptReply(5, "n"))]
    assert queue.ranks == ()


def test_two_threads_of_a_rank_may_ask() -> None:
    queue = PromptQueue()
    queue.prompt_asked(0, ask(6), 0.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    queue.answered(question, "n", 1.0)
    assert queue.prompt_asked(0, ask(5), 2.0) == []  # it was made before the other one
    assert queue.ranks == (0,)


def test_who_dies_or_goes_on_is_not_asked_for() -> None:
    queue = PromptQueue()
    for rank in (0, 1, 2):
        queue.prompt_asked(rank, ask(1), 0.0)
    question = queue.next_prompt(1.0)
    assert question is not None
    queue.rank_gone(0)
    assert queue.answered(question, "n", 1.0) == ([], "")
    queue.prompt_withdrawn(1, 1)
    assert queue.ranks == (2,)
    assert due(queue, 1.0) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["asked", "gone", "unasked", "answer", "time"]),
            st.integers(0, 3),
            st.sampled_from(["n", "all: n", "@1", "0,1: c", "@?"]),
        )
    )
)
def test_no_question_is_answered_twice_or_forgotten(steps: list[tuple[str, int, str]]) -> None:
    queue, now, open_questions, numbers = PromptQueue(), 0.0, dict[int, int](), dict.fromkeys(range(4), 0)
    for what, rank, line in steps:
        now += 0.1
        if what == "asked" and rank not in open_questions:
            numbers[rank] += 1
            open_questions[rank] = numbers[rank]
            queue.prompt_asked(rank, ask(numbers[rank]), now)
        elif what == "gone":
            queue.rank_gone(rank)
            open_questions.pop(rank, None)
        elif what == "unasked" and rank in open_questions:
            queue.prompt_withdrawn(rank, open_questions.pop(rank))
        elif what == "time":
            now += 1
        elif what == "answer" and (question := queue.next_prompt(now)) is not None:
            for answer in queue.answered(question, line, now)[0]:
                assert open_questions.pop(answer.rank) == answer.reply.number
        assert queue.ranks == tuple(sorted(open_questions))
    assert (queue.next_prompt(now + 10) is None) == (not open_questions)


class NoUser:
    """Prompter that must not be used: the interrupt comes before."""

    shows_beside = False

    def ask(self, prompt: str, *, hidden: bool) -> str:
        raise AssertionError("asked")


class InterruptedLock:
    """Lock whose first block the user interrupts as it ends."""

    def __init__(self) -> None:
        self._interrupts = iter([KeyboardInterrupt()])

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if (interrupt := next(self._interrupts, None)) is not None:
            raise interrupt


def test_user_interrupting_before_the_prompt_is_not_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = PromptDesk(NoUser(), None)
    desk.prompt_asked(0, ask(1), 0.0)
    question = desk.next_prompt(GATHER)
    assert question is not None
    monkeypatch.setattr(desk, "_lock", InterruptedLock())
    with pytest.raises(KeyboardInterrupt):
        desk.ask(question)
    assert not desk.asking

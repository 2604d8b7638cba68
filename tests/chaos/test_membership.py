"""The frame of campaigns that change the members of a training, with a training that only pretends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.figures import Outcome
from chaos.journal import replayed
from chaos.membership import Change, MembershipCampaign, Teller, wrong_results


class Letters:
    """Reports of ranks; acts as a :class:`~chaos.campaign.Mailbox`, without ranks."""

    def __init__(self) -> None:
        self.letters: list[dict[str, Any]] = []

    def clear(self) -> None:
        self.letters.clear()

    def wait_until(self, true: Callable[[list[dict[str, Any]]], bool], timeout: float) -> bool:
        return true(self.letters)


@dataclass(frozen=True)
class Pair:
    """Both ranks of the pretended training."""

    def __str__(self) -> str:
        return "both ranks"

    def together(self, letters: Sequence[dict[str, Any]], since: float) -> bool:
        return len({letter["rank"] for letter in letters}) == 2


QUIET = Change("nothing happens", "nothing", announced=True)
ANNOUNCED_LOSS = Change("a rank goes back", "go_back", announced=True)
LOSS = Change("a rank goes back", "go_back")
FORGETTING = Change("a rank forgets", "forget")
TOO_FAR = Change("a rank goes back too far", "go_back_too_far")
HANG = Change("a rank hangs", "hang")
END = Change("the training ends", "end")


class Pretended(MembershipCampaign):
    """Training of two ranks, whose letters each change writes."""

    within = 1.0
    longest_wait = 0.0
    round = 2

    def __init__(self, *changes: Change, hang_after: float = 60.0) -> None:
        super().__init__(changes)
        self.seed, self.plane, self.hang_after = 3, "none", hang_after
        self.mailbox: Any = Letters()
        self.story: list[str] = []
        self.trains_now = self.ended = False

    @property
    def trains(self) -> bool:
        return self.trains_now

    def start_training(self) -> None:
        self.story.append("start")
        self.trains_now = True

    def end_training(self) -> list[str]:
        self.story.append("end")
        self.trains_now = False
        return []

    def discard(self) -> None:
        self.story.append("discard")
        self.trains_now = False
        self._forget_tellers()

    def _dice(self, number: int) -> random.Random:
        return random.Random(number)

    def _tellers(self, letters: Sequence[dict[str, Any]]) -> Iterator[tuple[Teller, dict[str, Any]]]:
        for letter in letters:
            yield Teller(f"rank {letter['rank']}", 100 + letter["rank"]), letter

    def _raise_if_ended(self) -> None:
        if self.ended:
            raise RuntimeError("it has ended")

    def _where(self) -> str:
        return "nowhere"

    def _complete(self, outcome: Outcome) -> None:
        outcome.said = "done"

    def _tell(self, rank: int, *back: tuple[int, int, int], kept: str = "all") -> None:
        letter = {"what": "step", "rank": rank, "at": time.monotonic(), "kept": kept, "back": list(back)}
        self.mailbox.letters.append(letter)

    def _go_on(self) -> None:
        self._outcome.report = self._await_together(Pair)

    def nothing(self) -> None:
        self._changes("nothing")
        self._tell(0)
        self._tell(1)
        self._go_on()

    def go_back(self) -> None:
        self._tell(0, (7, 6, 6))
        self._tell(1)
        self._go_on()

    def forget(self) -> None:
        self.nothing()
        self._tell(1, kept="something")
        self._go_on()

    def go_back_too_far(self) -> None:
        self._tell(0, (7, 3, 6))
        self._tell(1)
        self._go_on()

    def hang(self) -> None:
        self._tell(0)
        self._go_on()

    def end(self) -> None:
        self.ended = True
        self._go_on()


def test_a_change_after_which_all_go_on_is_well() -> None:
    (outcome,) = Pretended(QUIET).play(1)
    assert outcome.ok
    assert outcome.report is not None
    assert [event.split(maxsplit=1)[1] for event in outcome.events] == [
        "nothing",
        "both ranks have gone on together",
    ]
    assert (outcome.seed, outcome.plane, outcome.fault, outcome.limit) == (3, "none", "nothing happens", 1.0)
    assert outcome.said == "done"


def test_each_kind_comes_once_and_the_training_ends_after_each_round_and_at_the_end() -> None:
    campaign = Pretended(QUIET, LOSS)
    outcomes = list(campaign.play(5))
    assert [outcome.fault for outcome in outcomes[:2]] == [QUIET.name, LOSS.name]
    assert [outcome.number for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert campaign.story == ["start", "end"] * 3
    (again,) = Pretended(QUIET, LOSS).play(1, first=3)
    assert again.fault == outcomes[3].fault


def test_what_is_lost_is_named() -> None:
    (outcome,) = Pretended(LOSS).play(1)
    assert outcome.ok, "as far as to its commit a rank may go back after a failure"
    for change, what in (
        (ANNOUNCED_LOSS, "ranks went back though nothing failed: {'rank 0': 1}"),
        (FORGETTING, "rank 1 remembers something in place of all"),
        (TOO_FAR, "rank 0 went back to 3, before its commit 6"),
    ):
        (outcome,) = Pretended(change).play(1)
        assert outcome.lost == [what]


def test_a_hang_and_an_end_are_told_and_the_training_is_replaced() -> None:
    campaign = Pretended(HANG, QUIET, hang_after=0.0)
    hanging, quiet = campaign.play(2)
    assert hanging.hang == "both ranks do not train together; nowhere"
    assert campaign.story[:3] == ["start", "discard", "start"]
    assert quiet.hang, "it has no time either"
    (ended,) = Pretended(END).play(1)
    assert ended.wrong == ["RuntimeError: it has ended"]


def result(**changed: Any) -> dict[str, Any]:
    groups = [[[0, 1], 2], [[0], 1]]
    weight, momentum = replayed([((0, 1), 2), ((0,), 1)])
    return {"groups": groups, "step": 3, "weights": [weight], "momenta": [momentum], **changed}


def test_results_are_calculated_again() -> None:
    assert wrong_results([result(), result()]) == []
    assert "the ranks differ" in wrong_results([result(), result(step=4)])[0]
    assert "is not what its groups give" in wrong_results([result(weights=[0.5])])[0]
    assert "steps were lost or done twice" in wrong_results([result(step=4)])[0]

"""Training whose members are changed again and again: how a change of any kind of member is drawn, played and judged.

The trainings, and the changes that can befall them, are defined by two modules: the ranks of a pool
(:mod:`chaos.elastic`), and those of the hosts of a job (:mod:`chaos.elastic_hosts`).
"""

from __future__ import annotations

import abc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from chaos.campaign import Hang, Mailbox
from chaos.figures import Outcome
from chaos.journal import replayed


@dataclass(frozen=True, slots=True)
class Change:
    """Kind of change.

    Attributes:
        name: As in the table.
        play: How it is made; a method of the campaign.
        announced: Whether no rank may lose a step.
        weight: How often it is drawn, compared with the others.
    """

    name: str
    play: str
    announced: bool = False
    weight: int = 2


@dataclass(frozen=True, slots=True)
class Teller:
    """Process that has sent a letter.

    Attributes:
        name: As it is called in an outcome's story.
        pid: Distinguishes it from those that had this name before.
    """

    name: str
    pid: int


class Members(Protocol):
    """Ranks that are to train together. As text, their names."""

    def together(self, letters: Sequence[dict[str, Any]], since: float) -> bool:
        """Whether each of them has reported two commits since then that it made with just the others."""


class MembershipCampaign(abc.ABC):
    """Campaign of changes on one training, which is replaced only after an error.

    Args:
        changes: The changes to draw from.

    Attributes:
        seed: Seed of all draws.
        plane: The data plane, as in the table.
        hang_after: Seconds after which an unfinished step counts as hanging.
        mailbox: Socket to which ranks report their commits.
    """

    seed: int
    plane: str
    hang_after: float
    mailbox: Mailbox

    within: ClassVar[float]
    """Seconds from a change until all ranks that there are then have completed steps together."""
    longest_wait: ClassVar[float]
    """Seconds between the parts of a change, at most."""
    round: ClassVar[int | None] = None
    """Changes after which the training is ended, so that its results can be checked; by default only after the last one."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)
        #: The change being played: its dice, its outcome, and the instants of the beginning and of the latest change.
        self._rng = random.Random(0)
        self._outcome = Outcome(0, 0, "", "", "", -1, self.within)
        self._began = self._at = 0.0
        #: The hash of the memory of each process, and how often it went back, by its latest report.
        self._known: dict[Teller, str] = {}
        self._back: Counter[Teller] = Counter()

    # -- for subclasses -----------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def trains(self) -> bool:
        """Whether there is a training that has not been ended."""

    @abc.abstractmethod
    def start_training(self) -> None:
        """Begin a training. Returns when it is under way."""

    @abc.abstractmethod
    def end_training(self) -> list[str]:
        """End the training, if there is one. Returns the errors of its results, and its leftovers."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Discard a training that has failed."""

    @abc.abstractmethod
    def _dice(self, number: int) -> random.Random:
        """Where everything about this change is drawn from."""

    @abc.abstractmethod
    def _tellers(self, letters: Sequence[dict[str, Any]]) -> Iterable[tuple[Teller, dict[str, Any]]]:
        """Return these letters, each with the process that sent it; without those of processes that belong to the
        training no longer."""

    @abc.abstractmethod
    def _raise_if_ended(self) -> None:
        """Raise ``RuntimeError`` if the training has ended by itself."""

    @abc.abstractmethod
    def _where(self) -> str:
        """Return a description of a training that hangs."""

    @abc.abstractmethod
    def _complete(self, outcome: Outcome) -> None:
        """Add the training's output to the story of an outcome."""

    def _usable(self, outcome: Outcome) -> bool:
        """Whether the training can be played on after this."""
        return not (outcome.hang or outcome.wrong)

    # -- trials -------------------------------------------------------------------------------------------------------

    def play(self, count: int, first: int = 0) -> Iterator[Outcome]:
        """Make ``count`` changes, beginning with the one that has this number; each kind once before any twice."""
        for number in range(first, first + count):
            rng = self._rng = self._dice(number)
            drawn = rng.choices(self.changes, [change.weight for change in self.changes])[0]
            change = self.changes[number] if number < len(self.changes) else drawn
            round_over = self.round is not None and (number - first) % self.round == self.round - 1
            yield self._play_one(change, number, last=round_over or number == first + count - 1)

    def _play_one(self, change: Change, number: int, *, last: bool) -> Outcome:
        outcome = self._outcome = Outcome(self.seed, number, self.plane, change.name, "any", -1, self.within)
        try:
            if not self.trains:
                self.start_training()
            self._began = self._at = time.monotonic()
            self.mailbox.clear()
            back = self._back.copy()
            getattr(self, change.play)()
            if change.announced and (again := self._back - back):
                times = {teller.name: count for teller, count in again.items()}
                outcome.lost.append(f"ranks went back though nothing failed: {times}")
            if last:
                outcome.wrong += self.end_training()
        except Hang as hang:
            outcome.hang = str(hang)
        except Exception as error:  # noqa: BLE001  (any error is this change's outcome)
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        self._complete(outcome)
        if not self._usable(outcome):
            self.discard()
        return outcome

    def _event(self, text: str) -> None:
        self._outcome.events.append(f"{time.monotonic() - self._began:8.3f} {text}")

    def _changes(self, text: str) -> None:
        """Make the change now."""
        self._at = time.monotonic()
        self._event(text)

    def _wait_a_little(self, most: float | None = None) -> None:
        time.sleep(self._rng.uniform(0, self.longest_wait if most is None else most))

    # -- checks after each change -------------------------------------------------------------------------------------

    def _await_together(self, wanted: Callable[[], Members]) -> float:
        """Wait until all expected processes have completed two commits together. Returns seconds since the change.

        Args:
            wanted: Is called again and again: ranks can be lost during the wait.

        Raises:
            Hang: They have not.
            RuntimeError: The training has ended.
        """
        at = time.monotonic()
        deadline = at + self.hang_after
        while time.monotonic() < deadline:
            members = wanted()
            if self.mailbox.wait_until(lambda letters, m=members: m.together(letters, at), 0.2):  # type: ignore[misc]
                self._hear()
                self._event(f"{members} have gone on together")
                return time.monotonic() - self._at
            self._raise_if_ended()
        raise Hang(f"{wanted()} do not train together; {self._where()}")

    def _hear(self) -> None:
        """Check the ranks' reports: each has kept its memory, and went back no further than to its commit."""
        # Ranks go on sending meanwhile: later letters have their turn next time.
        letters = [letter for letter in tuple(self.mailbox.letters) if letter["what"] == "step"]
        for teller, letter in self._tellers(letters):
            before = self._known.setdefault(teller, letter["kept"])
            if letter["kept"] != before:
                self._outcome.lost.append(f"{teller.name} remembers {letter['kept']} in place of {before}")
                self._known[teller] = letter["kept"]
            for done, to, committed in letter["back"][self._back[teller] :]:
                self._event(f"{teller.name} went back from step {done} to {to}")
                if to < committed:
                    self._outcome.lost.append(
                        f"{teller.name} went back to {to}, before its commit {committed}"
                    )
            # Letters of before the latest ones are read again.
            self._back[teller] = max(self._back[teller], len(letter["back"]))

    def _forget_tellers(self) -> None:
        """New processes train, which nothing is known of."""
        self._known.clear()
        self._back.clear()


def wrong_results(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the errors in the results of ranks that have trained together: each a dict of ``groups``, ``step``,
    ``weights`` and ``momenta``, as ranks of all campaigns give them."""
    first = found[0]
    wrong = [f"the ranks differ: {list(found)}"] if any(one != first for one in found) else []
    weight, momentum = replayed([(tuple(ranks), count) for ranks, count in first["groups"]])
    if (first["weights"], first["momenta"]) != ([weight], [momentum]):
        wrong.append(f"{first} is not what its groups give: {weight}, {momentum}")
    if sum(count for _, count in first["groups"]) != first["step"]:
        wrong.append(f"steps were lost or done twice: {first}")
    return wrong

"""Membership as a client knows it: which ranks live, which have died, and which collectives wait."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlab.collectives.protocol import messages as m

LEAVES = "leaves at the next commit"
"""What is shown of a rank that was released, and that trains until then."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The ranks of the job now.

    Attributes:
        expected: Ranks that should make up the world; empty if no client and no setting has said.
        members: Living ranks, in order.
        deaths: Ranks that died and were not replaced, with process id, time and reason.
        epoch: Epoch of the world; 0 before it was formed for the first time.
        waiting: Members that elastic training has to let in.
        formed: Ranks that this epoch of the world is made of; empty until it has begun.
        leaving: Members that were released, and leave where elastic training lets the world change.
        restoring: Whether a coordinator's successor still waits for ranks: until it has heard them, it does not know which ranks of the
            world live or leave.
    """

    expected: tuple[int, ...] = ()
    members: tuple[m.Member, ...] = ()
    deaths: tuple[m.Death, ...] = ()
    epoch: int = 0
    waiting: tuple[int, ...] = ()
    formed: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    restoring: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of the living ranks."""
        return tuple(member.rank for member in self.members)

    @property
    def missing(self) -> tuple[int, ...]:
        """Expected ranks that do not live: not started yet, or dead."""
        living = set(self.ranks)
        return tuple(rank for rank in self.expected if rank not in living)

    @property
    def complete(self) -> bool:
        """Whether the world was formed and all expected ranks live."""
        return self.epoch > 0 and not self.missing


@dataclass(frozen=True, slots=True)
class Stall:
    """A collective that has been waiting for long.

    Attributes:
        process_set: Its process set.
        seconds: How long.
        kind, name: Which collective.
        waited: Ranks that submitted it. sites: the line of code, for each of them.
        missing: Ranks that did not, and for which the others wait.
        joined: Ranks that have joined: they take part without submitting it.
    """

    process_set: int
    seconds: float
    kind: int
    name: str
    waited: tuple[int, ...]
    missing: tuple[int, ...]
    sites: tuple[str, ...]
    joined: tuple[int, ...] = ()

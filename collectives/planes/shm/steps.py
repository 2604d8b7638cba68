"""What an operation of several steps looks like to the plane that drives it."""

from __future__ import annotations

from typing import Protocol

from hvdlab.collectives.planes.shm.slots import StepViews


class Steps(Protocol):
    """An operation of ``steps`` steps, each at most one slot of every member. Steps come in order.

    ``slots`` are the slots of the step, by member, in the type that the operation works in.
    """

    @property
    def steps(self) -> int: ...

    def fill(self, step: int, slots: StepViews) -> None:
        """Put what the other members need into this member's slot."""

    def take(self, step: int, slots: StepViews) -> None:
        """Get what this member needs from all slots, which are full."""


class Folding(Steps, Protocol):
    """An operation in which each member reduces a slice of every step for all."""

    def fold(self, step: int, slots: StepViews) -> None:
        """Reduce this member's slice over all slots into its own; ``take`` then finds the result."""

"""In which order a member's stages follow each other, and why no slot is overwritten before all have read it.

Steps are numbered through all operations of an epoch; step ``t`` uses slot ``t % slots`` of every member. A member
*fills* its slot for a step and posts ``arrived``; having waited for all members' ``arrived`` it *takes* what it needs
from all slots. Where each member reduces a slice for the others there is a stage in between: it *folds* its slice into
its own slot and posts ``reduced``; having waited for all members' ``reduced``, it takes.

A member runs ``ahead`` steps before it first waits. No member counts how far others have read its slots; that follows from
what it has waited for:

* Two stages, iteration ``i``: fill ``i``, take ``i - ahead``. Before filling ``i`` a member has taken
  ``i - 1 - ahead``, so all members had filled that, so each was past iteration ``i - 2 - ahead``, in which it took
  ``i - 2 - 2*ahead``. Hence ``slots >= 2 + 2*ahead`` suffices.
* Three stages, iteration ``i``: fill ``i``, fold ``i - ahead``, take ``i - 2*ahead``. Before filling ``i`` a member
  has folded ``i - 1 - ahead``, so all members were past iteration ``i - 2 - ahead``, in which each took ``i - 2 - 3*ahead``.
  Hence ``slots >= 2 + 3*ahead``.
* Between operations: the last wait of an operation that ends before step ``t`` was for step ``t - 1`` of all members,
  so each has taken ``t - 2 - ahead``. The next operation fills up to ``t + ahead`` before its first wait, which
  is the same bound; after that wait a member knows that all others have left the earlier operation.

Every operation therefore waits for *all* members in each of its steps, even where it needs one member's data only.
``tests/collectives/planes/test_shm_pipeline.py`` replays these sequences under random schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum


class Stage(IntEnum):
    FILL = 0
    FOLD = 1
    TAKE = 2


def two_stages(steps: int, ahead: int) -> Iterator[tuple[Stage, int]]:
    """The order of (stage, step within the operation) without folding."""
    for i in range(steps + ahead):
        if i < steps:
            yield Stage.FILL, i
        if i >= ahead:
            yield Stage.TAKE, i - ahead


def three_stages(steps: int, ahead: int) -> Iterator[tuple[Stage, int]]:
    """The order of (stage, step within the operation) with folding."""
    for i in range(steps + 2 * ahead):
        if i < steps:
            yield Stage.FILL, i
        if ahead <= i < steps + ahead:
            yield Stage.FOLD, i - ahead
        if i >= 2 * ahead:
            yield Stage.TAKE, i - 2 * ahead


def ahead_of_two(slots: int) -> int:
    """How far a member may run ahead in :func:`two_stages`."""
    return (slots - 2) // 2


def ahead_of_three(slots: int) -> int:
    """How far a member may run ahead in :func:`three_stages`; 5 slots are the least."""
    return (slots - 2) // 3

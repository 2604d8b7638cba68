"""The cases of a test: every combination of its parameters, run one after the other on one group of workers.

The items of pytest are the groups: a combination takes milliseconds, which collecting, fixtures and the check for leaks would
multiply. A combination that fails does not keep the others from running; each is named with the failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from conformance.planes.harness import PlaneUnderTest, WorkerGroup, WorkersHung
from hvdlab.collectives.types import DType, ReduceOp
from support import effort


class Matrix:
    """Runner of the cases of one test on one group."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def run(self, case: Callable[..., None], **axes: Sequence[Any]) -> None:
        """Call ``case(**combination)`` for each combination of ``axes`` that is to run on this group.

        Raises:
            ExceptionGroup: Those that failed, each with its combination as a note. After workers that hung, the rest is not
                tried.
        """
        chosen = selected(self.group.plane, self.group.size, list(axes.values()))
        failed: list[Exception] = []
        for values in chosen:
            combination = dict(zip(axes, values, strict=True))
            try:
                make_usable(self.group)
                case(**combination)
            except Exception as error:  # noqa: BLE001  # a case's exception is raised below, with its name
                error.add_note(", ".join(f"{name}={label(value)}" for name, value in combination.items()))
                failed.append(error)
                if isinstance(error, WorkersHung):
                    break
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(chosen)} cases failed", failed)


def selected(plane: PlaneUnderTest, size: int, axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the combinations for a plane and size: all, or those that :attr:`PlaneUnderTest.every` and ``normally``
    leave."""
    every = plane.every if effort.examples(1) > 1 else max(plane.every, plane.normally)
    positions = list(itertools.product(*(range(len(axis)) for axis in axes)))
    if len(positions) >= every:
        positions = [position for position in positions if (sum(position) + size) % every == 0]
    return [tuple(axis[i] for axis, i in zip(axes, position, strict=True)) for position in positions]


def make_usable(group: WorkerGroup) -> None:
    """Begin a new generation if the last run left the plane spent, with new workers if it hung."""
    if group.closed:
        group.renew()
    if not group.clean:
        group.configure()


def label(value: Any) -> str:
    """Return a parameter's value as reports name it."""
    match value:
        case DType():
            return value.label
        case ReduceOp():
            return value.name
        case _:
            return str(value)

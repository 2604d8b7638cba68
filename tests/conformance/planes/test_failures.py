"""A member that waits in vain is released, and the next generation works.

Only the abort ends its wait: Gloo, which has a limit of its own, waits for an hour. A member that is not released
hangs, and the call fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.planes.conftest import ABORTABLE, skip_unless_available
from conformance.planes.failures import WAITING
from conformance.planes.harness import Died, WorkerGroup
from conformance.planes.matrix import Matrix
from conformance.planes.planes_under_test import CHUNK
from hvdlab.collectives.types import DType


def works(group: WorkerGroup) -> None:
    checksums = group.run("conformance.planes.cases:allreduce", counts=[CHUNK], dtype=DType.F32)
    assert len(set(checksums)) == 1


@pytest.mark.parametrize("resident_group", ABORTABLE, indirect=True)
def test_abort_ends_a_wait(group: WorkerGroup, matrix: Matrix) -> None:
    skip_unless_available(group.plane, "abort")
    early = list(range(group.size - 1))

    def case(what: str, count: int) -> None:
        outcomes = group.outcomes(
            "conformance.planes.failures:abort_while_waiting", only=early, what=what, count=count
        )
        assert outcomes == [None] * len(early)
        group.configure()
        works(group)

    matrix.run(case, what=WAITING, count=[30, 5 * CHUNK])


@pytest.mark.parametrize("resident_group", ABORTABLE, indirect=True)
def test_abort_ends_the_wait_for_a_message(group: WorkerGroup) -> None:
    skip_unless_available(group.plane, "abort", "messages")
    if group.size == 1:
        pytest.skip("there is no other member")
    early = list(range(group.size - 1))
    for count in (30, 5 * CHUNK):
        group.run("conformance.planes.cases:messages", count=count, dtype=DType.F32)
        outcomes = group.outcomes("conformance.planes.failures:abort_a_message", only=early, count=count)
        assert outcomes == [None] * len(early)
        group.configure()
        works(group)


@pytest.mark.parametrize("resident_group", ABORTABLE, indirect=True)
def test_abort_ends_whatever_runs(group: WorkerGroup, matrix: Matrix) -> None:
    skip_unless_available(group.plane, "abort")

    def case(seed: int) -> None:
        group.run("conformance.planes.failures:abort_at_random", seed=seed)
        group.configure()
        works(group)

    matrix.run(case, seed=range(6))


def test_nothing_starts_after_an_abort(group: WorkerGroup) -> None:
    skip_unless_available(group.plane, "abort")
    group.run("conformance.planes.failures:abort_first")
    group.configure()
    works(group)


@pytest.mark.parametrize("what", ["allreduce", "allreduce-large", "alltoall"])
def test_survivors_of_a_killed_member_go_on(mortal_group: WorkerGroup, what: str) -> None:
    group = mortal_group
    victim = group.size // 2
    outcomes = group.outcomes(
        "conformance.planes.failures:outlive",
        victim=victim,
        victim_pid=group.pid(victim),
        what=what,
        count=5 * CHUNK,
    )
    assert outcomes.pop(victim) == Died(-9)
    assert outcomes == [None] * (group.size - 1)
    group.configure()
    works(group)


def test_nothing_is_left_when_all_are_killed(mortal_group: WorkerGroup) -> None:
    works(mortal_group)
    for member in mortal_group.living:
        maps = Path(f"/proc/{mortal_group.pid(member)}/maps").read_text()
        assert "/dev/shm/" not in maps, "a plane must not use names in /dev/shm: they outlive a SIGKILL"
    mortal_group.kill()

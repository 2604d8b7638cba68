"""The suite of planes over `cuda/ipc` on a real GPU, which all members share: the same tests with other members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.planes import test_failures as failures
from conformance.planes.conftest import group, matrix  # noqa: F401  # fixtures
from conformance.planes.failures import WAITING
from conformance.planes.harness import LIGHT, PlaneUnderTest, WorkerGroup
from conformance.planes.matrix import Matrix
from conformance.planes.test_planes import *


def plane(name: str, sizes: tuple[int, ...], **options: str) -> PlaneUnderTest:
    return PlaneUnderTest(
        name,
        "hvdlab.collectives.planes.gpu.ipc_plane:CudaPlane",
        sizes=sizes,
        actor="conformance.planes.cuda_actor:real_actor",
        lacks=frozenset({"messages"}),
        options=options,
        launcher=LIGHT,
        library=True,  # the driver keeps descriptors for the life of the process
    )


ONE_WORKS, ALL_WORK = plane("one-works", (1, 2, 4, 8)), plane("all-work", (3,), workers="all")
GROUPS = [(each, size) for each in (ONE_WORKS, ALL_WORK) for size in each.sizes]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda pair: f"{pair[0].name}-{pair[1]}")
def resident_group(real_gpu: None, request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    members = WorkerGroup(*request.param)
    yield members
    members.close()


@pytest.fixture
def mortal_group(real_gpu: None) -> Iterator[WorkerGroup]:
    """Yield three members, of which one may be killed while the others have its memory open."""
    members = WorkerGroup(ONE_WORKS, 3)
    try:
        members.configure()
        yield members
        members.close()
    finally:
        members.kill()


def test_an_abort_ends_a_wait(group: WorkerGroup, matrix: Matrix) -> None:  # noqa: F811
    if group.size > 1:
        failures.test_abort_ends_a_wait(group, matrix)


def test_an_abort_ends_whatever_runs(group: WorkerGroup, matrix: Matrix) -> None:  # noqa: F811
    if group.size > 1:
        failures.test_abort_ends_whatever_runs(group, matrix)


@pytest.mark.parametrize("what", WAITING)
def test_survivors_of_a_killed_member_go_on(mortal_group: WorkerGroup, what: str) -> None:
    failures.test_survivors_of_a_killed_member_go_on(mortal_group, what)

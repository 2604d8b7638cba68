"""The suite of planes over `cuda/hierarchical`, with members on simulated hosts that all use the first GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance import test_failures as failures
from conformance.conftest import group, matrix  # noqa: F401  # fixtures
from conformance.failures import WAITING
from conformance.harness import PlaneUnderTest, WorkerGroup
from conformance.matrix import Matrix
from conformance.test_planes import *


def plane(hosts: str) -> PlaneUnderTest:
    return PlaneUnderTest(
        f"hosts-{hosts}",
        "hvdlab.collectives.planes.hierarchical:HierarchicalPlane",
        sizes=(len(hosts),),
        actor="conformance.cuda_actor:real_hierarchical_actor",
        lacks=frozenset({"messages"}),
        hosts=hosts,
        library=True,  # the driver keeps descriptors for the life of the process
    )


EVEN, UNEVEN, SINGLE = plane("aabb"), plane("aab"), plane("ab")


@pytest.fixture(scope="module", params=[EVEN, UNEVEN, SINGLE], ids=lambda one: one.name)
def resident_group(real_gpu: None, request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    members = WorkerGroup(request.param, request.param.sizes[0])
    yield members
    members.close()


@pytest.fixture
def mortal_group(real_gpu: None) -> Iterator[WorkerGroup]:
    members = WorkerGroup(UNEVEN, 3)
    try:
        members.configure()
        yield members
        members.close()
    finally:
        members.kill()


def test_an_abort_ends_a_wait(group: WorkerGroup, matrix: Matrix) -> None:  # noqa: F811
    failures.test_abort_ends_a_wait(group, matrix)


def test_an_abort_ends_whatever_runs(group: WorkerGroup, matrix: Matrix) -> None:  # noqa: F811
    failures.test_abort_ends_whatever_runs(group, matrix)


@pytest.mark.parametrize("what", WAITING)
def test_survivors_of_a_killed_member_go_on(mortal_group: WorkerGroup, what: str) -> None:
    failures.test_survivors_of_a_killed_member_go_on(mortal_group, what)

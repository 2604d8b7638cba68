"""The ``group`` fixture: resident workers of each plane and size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.harness import PlaneUnderTest, WorkerGroup
from conformance.planes_under_test import PLANES

SEVERAL = [
    pytest.param((plane, size), id=f"{plane.name}-{size}")
    for plane in PLANES
    for size in plane.sizes
    if size > 1
]
GROUPS = [pytest.param((plane, size), id=f"{plane.name}-{size}") for plane in PLANES for size in plane.sizes]
_reasons: dict[str, str | None] = {}


def skip_unless_available(plane: PlaneUnderTest, *needs: str) -> None:
    """Skip where the plane does not exist here, or can't do one of ``needs``."""
    if plane.name not in _reasons:
        _reasons[plane.name] = plane.unavailable()
    if _reasons[plane.name]:
        pytest.skip(f"{plane.name}: {_reasons[plane.name]}")
    if missing := plane.lacks & set(needs):
        pytest.skip(f"{plane.name} can't {', '.join(sorted(missing))}")


@pytest.fixture(scope="package", params=GROUPS)
def resident_group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    """The workers that all tests of one plane and size share."""
    plane, size = request.param
    skip_unless_available(plane)
    group = WorkerGroup(plane, size)
    yield group
    group.close()


@pytest.fixture
def group(resident_group: WorkerGroup) -> WorkerGroup:
    """A configured group; a new epoch if the last test left the plane spent."""
    if resident_group.closed:
        pytest.fail("an earlier test hung, and its workers were killed", pytrace=False)
    if not resident_group.clean:
        resident_group.configure()
    return resident_group


@pytest.fixture(params=SEVERAL)
def mortal_group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    """A configured group of several members for one test, whose workers may be killed."""
    plane, size = request.param
    skip_unless_available(plane, "survive")
    group = WorkerGroup(plane, size)
    try:
        group.configure()
        yield group
        group.close()
    finally:
        group.kill()

"""The ``group`` fixture: resident workers of each plane and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from conformance.planes.harness import PlaneUnderTest, WorkerGroup
from conformance.planes.matrix import Matrix, make_usable
from conformance.planes.planes_under_test import PLANES


def _params(planes: Iterable[PlaneUnderTest], fits: Callable[[PlaneUnderTest, int], bool]) -> list[Any]:
    return [
        pytest.param((plane, size), id=f"{plane.name}-{size}")
        for plane in planes
        for size in plane.sizes
        if fits(plane, size)
    ]


GROUPS = _params(PLANES, lambda plane, size: True)
ABORTABLE = _params(PLANES, lambda plane, size: size > 1 and "abort" not in plane.lacks)
# Workers of their own for each test are dear: thinned out planes get one size, in which a member remains to work with.
MORTAL = _params(PLANES, lambda plane, size: size == 3 if plane.every > 1 else size > 1)
_reasons: dict[object, str | None] = {}


def skip_unless_available(plane: PlaneUnderTest, *needs: str) -> None:
    """Skip where the plane does not exist here, or can't do one of ``needs``."""
    question = plane.missing or (plane.target, *plane.environment.items())
    if question not in _reasons:
        _reasons[question] = plane.unavailable()
    if _reasons[question]:
        pytest.skip(f"{plane.name}: {_reasons[question]}")
    if missing := plane.lacks & set(needs):
        pytest.skip(f"{plane.name} can't {', '.join(sorted(missing))}")


@pytest.fixture(scope="package", params=GROUPS)
def resident_group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    """Yield the workers that all tests of one plane and size share."""
    plane, size = request.param
    skip_unless_available(plane)
    group = WorkerGroup(plane, size)
    yield group
    group.close()


@pytest.fixture
def group(resident_group: WorkerGroup) -> WorkerGroup:
    """Return a configured group; a new generation if the last test left the plane spent."""
    make_usable(resident_group)
    return resident_group


@pytest.fixture
def matrix(group: WorkerGroup) -> Matrix:
    """Return an object that runs the combinations of a test's parameters on its group."""
    return Matrix(group)


@pytest.fixture(params=MORTAL)
def mortal_group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    """Yield a configured group of several members for one test, whose workers may be killed."""
    plane, size = request.param
    skip_unless_available(plane, "survive")
    group = WorkerGroup(plane, size)
    try:
        group.configure()
        yield group
        group.close()
    finally:
        group.kill()

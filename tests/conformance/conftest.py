"""The ``group`` fixture: resident workers of each plane and size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import effort
from conformance.harness import PlaneUnderTest, WorkerGroup
from conformance.planes_under_test import PLANES


def _params(planes: Iterable[PlaneUnderTest], fits: Callable[[PlaneUnderTest, int], bool]) -> list[Any]:
    return [
        pytest.param((plane, size), id=f"{plane.name}-{size}")
        for plane in planes
        for size in plane.sizes
        if fits(plane, size)
    ]


GROUPS = _params(PLANES, lambda plane, size: True)
ABORTABLE = _params(PLANES, lambda plane, size: size > 1 and "abort" not in plane.lacks)
# Workers of their own for each test are dear: thinned out planes get one size, in which someone is left to work with.
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin the cases out where :attr:`PlaneUnderTest.every` and :attr:`PlaneUnderTest.normally` say so."""
    cases: dict[Any, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "resident_group" in getattr(item, "fixturenames", ()):
            plane, size = item.callspec.params["resident_group"]
            if _every(plane) > 1:
                cases.setdefault((item.function, plane.name, size), []).append(item)
    dropped = set()
    for (_, _, size), group in cases.items():
        plane = group[0].callspec.params["resident_group"][0]
        if len(group) >= (every := _every(plane)):
            dropped |= {item for item in group if (_position(item) + size) % every}
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def _every(plane: PlaneUnderTest) -> int:
    return plane.every if effort.examples(1) > 1 else max(plane.every, plane.normally)


def _position(item: pytest.Function) -> int:
    """Sum of the positions of the case's own parameters."""
    return sum(index for name, index in item.callspec.indices.items() if name != "resident_group")


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
    if resident_group.closed:  # an earlier test hung, and its workers were killed
        resident_group.renew()
    if not resident_group.clean:
        resident_group.configure()
    return resident_group


@pytest.fixture(params=MORTAL)
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

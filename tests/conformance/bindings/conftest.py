"""Resident ranks of each binding and size, which all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.bindings.harness import BINDINGS, SIZES, binding
from support.ranks.resident import Ranks

START_WITHIN = 120.0
"""Seconds: some frameworks take long to import where much else runs."""


@dataclass
class World:
    """Ranks that a binding is tried on.

    Attributes:
        name: The binding.
        ranks: The ranks.
    """

    name: str
    ranks: Ranks

    @property
    def closed(self) -> bool:
        return self.ranks.closed

    def renew(self) -> None:
        """After a test that failed."""
        self.ranks.renew()

    def check(self, function: Any, *args: Any) -> None:
        """Run a function that returns the problems of its rank; there must be none."""
        problems = self.ranks.run(function, self.name, *args, timeout=100)
        assert problems == [[]] * self.ranks.size


def _world(name: str, size: int) -> Iterator[World]:
    with Ranks(size, imports=[binding(name).module], timeout=START_WITHIN) as ranks:
        yield World(name, ranks)


@pytest.fixture(
    scope="package",
    params=[(name, size) for name in BINDINGS for size in SIZES],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield ranks of one binding, of each size."""
    yield from _world(*request.param)


@pytest.fixture(scope="package", params=BINDINGS)
def three(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield three ranks of one binding."""
    yield from _world(request.param, 3)

"""Networks of hosts, made once per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
from hosts import Network


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Networks are made of namespaces, which ordinary users may not make."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session", autouse=True)
def _permitted() -> None:
    reason = hosts.missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts."""
    with Network(2) as made:
        yield made

"""Tests on hosts that are made of namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.network import namespaces as hosts
from support.network.two_hosts import network, shell  # noqa: F401  (fixtures)


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

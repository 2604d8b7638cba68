"""Networks of hosts, made once per module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hosts
from hosts import Network


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

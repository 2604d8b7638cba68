"""The event loop of jupyter_client, for the conftests of tests that start kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jupyter_core.utils import ensure_event_loop


@pytest.fixture(scope="session", autouse=True)
def jupyter_loop() -> Iterator[None]:
    """Yield the event loop that jupyter_client keeps for blocking calls, made before any test is watched for leaks."""
    loop = ensure_event_loop()
    yield
    loop.close()

"""One JupyterLab for all pages of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="package", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where there is what pages need."""
    if find_spec("jupyterlab") is None or find_spec("playwright") is None:
        yield
        return
    from lab_page import CHROMIUM, shared_server

    with shared_server(tmp_path_factory.mktemp("jupyterlab")) if CHROMIUM else nullcontext():
        yield

"""One JupyterLab and one browser for all pages of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="package", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield a server where the pages' requirements are installed."""
    if find_spec("jupyterlab") is None or find_spec("playwright") is None:
        yield
        return
    from support.jupyter import chromium
    from support.jupyter.lab_page import shared_server

    if chromium.CHROMIUM is None:
        yield
        return
    with chromium.shared_chromium(), shared_server(tmp_path_factory.mktemp("jupyterlab")):
        yield

"""Where launchers are tried: temporary files of the test's own, so that leftovers can be seen."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is preloaded, and nothing is left in the temporary directory."""
    with tempfile.TemporaryDirectory(
        prefix="hvd-t-", dir="/tmp"
    ) as directory:  # Unix sockets need a short path
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("HVDLAB_PRELOAD", "")
        yield
        assert os.listdir(directory) == []

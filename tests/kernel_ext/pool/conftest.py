"""Pools of real processes, and their forbidden leftovers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvdlab.kernel_ext.notebook.pool import Pool
from patience import GONE

StartPool = Callable[..., Pool]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield temporary files and IPython's directory of the test's own, so that leftovers can be seen; no heavy
    imports."""
    # Unix sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="hvd-t-", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        monkeypatch.setenv("HVDLAB_PRELOAD", "")
        yield tmp_path
        assert leftovers(Path(directory)) == []
        assert leftovers(tmp_path / "ipython" / "profile_default" / "security") == []


def leftovers(directory: Path) -> list[str]:
    """Return names in a directory, once files being removed had time to go."""
    deadline = time.monotonic() + GONE
    while directory.exists() and os.listdir(directory) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(os.listdir(directory)) if directory.exists() else []


@pytest.fixture
def start_pool() -> Iterator[StartPool]:
    """Yield ``Pool.start``, stopped at the end; none of its processes may be left."""
    pools: list[Pool] = []

    def start(*args: object, **kwargs: object) -> Pool:
        pools.append(Pool.start(*args, **kwargs))  # type: ignore[arg-type]  # passed through
        return pools[-1]

    others = set(psutil.Process().children(recursive=True))
    yield start
    family = [child for child in psutil.Process().children(recursive=True) if child not in others]
    for pool in pools:
        pool.stop()
    _, alive = psutil.wait_procs(family, timeout=GONE)
    assert alive == []

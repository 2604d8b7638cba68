"""Fresh interpreters, with and without a Horovod that is installed, and a world of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hvdlab.torch as hvd
from support.patience import PROGRAM_PATIENCE

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """``python(*arguments, **variables)``: a fresh interpreter, which must succeed unless ``fails`` is given."""

    def run(*arguments: str, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        ours = ("HVDLAB_", "HOROVOD_", "PYTHONPATH")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**environ, **variables},
            capture_output=True,
            text=True,
            timeout=PROGRAM_PATIENCE,
            check=False,
        )
        assert (ran.returncode != 0) == fails, ran.stdout + ran.stderr
        return ran

    return run


@pytest.fixture
def real_horovod(tmp_path: Path) -> str:
    """Return a directory for ``PYTHONPATH`` in which another package is installed as Horovod."""
    package = tmp_path / "site" / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.28.1'\nREAL = True\n")
    (package / "torch" / "__init__.py").write_text("REAL = True\n")
    return str(package.parent)


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield a world of this process alone, with any launcher's variables in the environment."""
    for name in [name for name in os.environ if name.startswith(("HVDLAB_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    hvd.init()
    yield
    hvd.shutdown()

"""Starting ``kernel_ext/pool/keeper.py``: another process, which keeps a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE

KEEPER = Path(__file__).parents[1] / "integration/kernel_ext/pool/keeper.py"


def keeper(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Another process, which starts a pool called ``mine``; returns when that is up.

    Args:
        words: Its command line.
        variables: Its environment's variables beside ours.
    """
    process = subprocess.Popen(
        [sys.executable, str(KEEPER), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != "up\n":
        pytest.fail(process.stderr.read())
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=PATIENCE)

"""Tests on a real GPU of NVIDIA's. Where there is none they are skipped, with the plane's own reason."""

from __future__ import annotations

import os

import pytest

from hvdlab.collectives.planes.gpu import gpu_plane
from support.real_gpu import why_no_gpu


@pytest.fixture(scope="session", autouse=True)
def real_gpu() -> None:
    if reason := why_no_gpu():
        pytest.skip(reason)
    os.environ.pop(gpu_plane.SWITCH, None)  # in all processes that the tests start

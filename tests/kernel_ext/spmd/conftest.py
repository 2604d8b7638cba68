"""The kernel as installed: its kernelspec where Jupyter finds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_core.utils import ensure_event_loop

from spmd_kernel import kernelspec_in


@pytest.fixture(scope="session", autouse=True)
def jupyter_loop() -> Iterator[None]:
    """Yield the event loop that jupyter_client keeps for blocking calls, made before any test is watched for leaks."""
    loop = ensure_event_loop()
    yield
    loop.close()


@pytest.fixture(scope="package", autouse=True)
def kernelspec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory of Jupyter's in which there is the kernel; two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        yield kernelspec_in(tmp_path_factory.mktemp("jupyter"), patch)

"""The kernel as installed: its kernelspec where Jupyter finds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jupyter.loop import jupyter_loop  # noqa: F401  # fixture
from support.jupyter.spmd_kernel import kernelspec_in


@pytest.fixture(scope="module", autouse=True)
def kernelspec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory of Jupyter's in which there is the kernel; two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        yield kernelspec_in(tmp_path_factory.mktemp("jupyter"), patch)

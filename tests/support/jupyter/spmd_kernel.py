"""The kernel whose cells run on all ranks, for tests: found by Jupyter without being installed."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNELSPEC = Path(__file__).resolve().parents[3] / "kernel_ext" / "kernel" / "kernelspec"


def offer_kernel(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Let Jupyter find the kernel, in this directory."""
    kernels = directory / "kernels"
    kernels.mkdir()
    (kernels / "hvdlab").symlink_to(KERNELSPEC)
    patch.setenv("JUPYTER_PATH", str(directory))


def kernelspec_in(directory: Path, patch: pytest.MonkeyPatch, *, np: int = 2) -> Path:
    """The same; it starts ``np`` ranks, without their preloaded modules."""
    offer_kernel(directory, patch)
    patch.setenv("IPYTHONDIR", str(directory / "ipython"))
    patch.setenv("HVDLAB_NP", str(np))
    patch.setenv("HVDLAB_STRIP", "0")
    patch.setenv("HVDLAB_PRELOAD", "")
    return directory

"""Whether there is a GPU of NVIDIA's to test on."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from hvdlab.collectives.planes.gpu import gpu_plane

ASK = "from hvdlab.collectives.planes.gpu.ipc_plane import CudaPlane; print(CudaPlane.unavailable() or '', end='')"


@cache
def why_no_gpu() -> str:
    """Return why there is no GPU; empty if there is one. A process of its own asks the driver: one that has used it
    can't fork ranks."""
    reason = gpu_plane.why_missing()
    if reason is not None:
        return reason
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout if done.returncode == 0 else done.stderr[-2000:]

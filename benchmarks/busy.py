"""Other programs on the cores: what is measured beside them is as slow as on a machine that others use as well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep each core that this process may use busy with a loop of its own."""
    loop = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", loop, str(core)]) for core in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()

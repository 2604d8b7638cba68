"""Ranks of ``hvdlab check-gpus`` on simulated GPUs with a simulated NCCL; as a program, the whole command on two of them."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from hvdlab.runner import check_gpus
from support.fakes import nccl as fake_nccl

TESTS = Path(__file__).parents[2]


def rank_program(gpus: str, more: str = "", *, torch: bool = False) -> list[str]:
    """Return the program of a rank on the simulated GPU that its letter names, after more statements.

    Without ``torch`` the rank finds none: importing it, for a comparison with torch's own NCCL, takes most of a rank's time.
    """
    absent = "" if torch else "sys.modules['torch'] = None"
    text = f"""
import os, sys
{absent}
sys.path.insert(0, {str(TESTS)!r})
from support.fakes import cuda as fake_cuda
from support.fakes import nccl as fake_nccl
from hvdlab.runner import check_gpus
gpu = fake_cuda.install()
gpu.identity = {gpus!r}[int(os.environ["HVDLAB_RANK"])] * 32
fake_nccl.install(gpu)
check_gpus.ROUNDS, check_gpus.CALLS, check_gpus.WORK_BYTES = 1, 1, 4096
{more}
check_gpus.rank_main()
"""
    return [sys.executable, "-c", text]


def main() -> int:
    """Check two simulated GPUs; returns the exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    check_gpus.SIZES, check_gpus.WORK_SECONDS = {"4 KiB": 4096}, 0.1
    with tempfile.TemporaryDirectory() as directory:
        os.environ[fake_nccl.DIRECTORY] = directory
        # The limit is that of whoever runs this program.
        return check_gpus.run(2, rank_program("xy", torch=True), parser.parse_args().json, within=3600.0)


if __name__ == "__main__":
    sys.exit(main())

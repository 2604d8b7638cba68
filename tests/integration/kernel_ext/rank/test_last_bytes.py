"""A rank can be killed between any two steps of ours: all writes to its descriptors are shown, and once."""

from __future__ import annotations

import subprocess
import sys


def test_what_descriptors_got_survives_a_kill_before_any_step() -> None:
    """Between the moment in which bytes leave the pipe and the one in which a copy outlives the rank, too."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.kernel_ext.rank.dying"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    *wrong, steps = ended.stdout.splitlines()
    assert not wrong, "\n".join(wrong[:20])
    assert int(steps) > 100

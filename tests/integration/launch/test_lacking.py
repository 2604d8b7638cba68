"""Reports of an agent that does not start on another host, since a program is missing there."""

from __future__ import annotations

import sys
from pathlib import Path

from support.ranks.started import StartedRanks

MODULE = "lacks `hvdlab`: install hvdlab for it, or --launcher-option python=PATH names another one there"
PATH = "is not on that host under this path: --launcher-option python=PATH names another one there"


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_what_the_other_side_lacks_is_said(tmp_path: Path) -> None:
    # As ssh does: the words after the host's name are for a shell.
    shell = executable(tmp_path / "shell", 'shift; exec sh -c "$*"')
    bare = executable(tmp_path / "bare", f'exec {sys.executable} -I -S "$@"')
    for python, said in ((bare, MODULE), ("/no/such/python", PATH), ("true", "")):
        ranks = StartedRanks("ssh", "elsewhere.invalid:1", {"shell": shell, "python": python})
        try:
            ranks.starter.start([0], 1)
            reason = ranks.end_of(0).reason
        finally:
            ranks.close()
        assert reason.startswith("`shell` for elsewhere.invalid ended with exit code")
        assert reason.endswith(said)
        assert said or "names another one" not in reason

"""Hosts that are this machine, for pools and jobs over ssh: no namespaces, no root, no sshd.

Each loopback address counts as a host of its own, with an agent. In place of ssh a script runs commands here. Memory is shared by the ranks of a host alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

_SHELL = '#!/bin/sh\nshift\nexec sh -c "$*"\n'


def named(count: int, slots: int) -> str:
    """So many hosts with so many ranks each, as ``-H`` and ``hosts`` take them."""
    return ",".join(f"127.0.0.{number}:{slots}" for number in range(2, 2 + count))


def options(directory: Path) -> Mapping[str, str]:
    """Return options of the launcher ``ssh`` for these hosts.

    Args:
        directory: Where the script is written that stands for ssh.
    """
    shell = directory / "shell"
    if not shell.exists():
        shell.write_text(_SHELL)
        shell.chmod(0o700)
    return {"shell": shlex.quote(str(shell)), "host_names": "yes"}

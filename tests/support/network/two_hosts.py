"""Two hosts for tests, with a replacement of ssh between them, and commands that run on one to their end.

The fixtures are for the ``conftest.py`` of a folder, which imports them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support.network import namespaces as hosts
from support.network.namespaces import Host, Network
from support.network.remote_shell import RemoteShell


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Yield two hosts, which are namespaces of this one; skipped where those are not permitted."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture
def shell(network: Network, tmp_path: Path) -> Iterator[RemoteShell]:
    """Yield the replacement of ssh between them."""
    with RemoteShell(network, tmp_path) as made:
        yield made


def finished(
    host: Host, command: Sequence[str], env: Mapping[str, str], timeout: float
) -> tuple[int, str, str]:
    """A command on a host, which has ended; killed if it has not within ``timeout`` seconds. Returns exit code, stdout and stderr."""
    process = host.popen(
        command, env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out.decode(), err.decode()

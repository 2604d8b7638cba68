"""Tests by real ssh, between hosts made of namespaces. They are collected where they are named, as by ``make engines``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
from debian_packages import Unavailable, libraries, unpacked
from hosts import Network, Process
from patience import PATIENCE

collect_ignore_glob = [] if any("beside_sshd" in word for word in sys.argv) else ["test_*.py"]

CACHE = Path(__file__).parents[2] / "out/engines/sshd"
PACKAGES = ("openssh-server", "openssh-client", "libwrap0")
# The user `sshd` and /run/sshd are the host's alone: nothing of the machine is changed.
SERVE = """\
set -e
mount -t tmpfs tmpfs /run && mkdir -m 0755 /run/sshd
mount --bind "$1/passwd" /etc/passwd
exec "$2" -D -e -f "$1/sshd_config"
"""
SERVER = """\
Port 2222
HostKey {directory}/key
AuthorizedKeysFile {directory}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PidFile none
"""
CLIENT = """\
Host *
Port 2222
User root
IdentityFile {directory}/key
IdentitiesOnly yes
UserKnownHostsFile {directory}/known
StrictHostKeyChecking yes
BatchMode yes
"""


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Two hosts."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with Network(2) as made:
        yield made


@pytest.fixture(scope="session")
def ssh(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command that reaches the second host, on which sshd runs, from the first."""
    try:
        root = unpacked(CACHE, PACKAGES, "usr/sbin/sshd")
    except Unavailable as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("sshd")
    client, server = root / "usr/bin/ssh", network.hosts[1]
    environment = {"LD_LIBRARY_PATH": f"{libraries(root)}:{root}/lib/{os.uname().machine}-linux-gnu"}
    keygen = [str(root / "usr/bin/ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "key")]
    subprocess.run(keygen, env={**os.environ, **environment}, check=True)
    key = (directory / "key.pub").read_text()
    (directory / "known").write_text(f"[{server.name}]:2222 {key}")
    passwd = Path("/etc/passwd").read_text()
    if "\nsshd:" not in passwd:
        passwd += "sshd:x:74:74::/run/sshd:/usr/sbin/nologin\n"
    (directory / "passwd").write_text(passwd)
    (directory / "sshd_config").write_text(SERVER.format(directory=directory))
    (directory / "ssh_config").write_text(CLIENT.format(directory=directory))
    script = ["unshare", "--mount", "sh", "-c", SERVE, "sshd", str(directory), str(root / "usr/sbin/sshd")]
    with server.popen(script, env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as daemon:
        try:
            _await_listening(daemon)
            yield f"{client} -F {directory}/ssh_config"
        finally:
            daemon.kill()
            daemon.communicate(timeout=PATIENCE)


def _await_listening(daemon: Process) -> None:
    assert daemon.stderr is not None
    said = b""
    for line in daemon.stderr:
        said += line
        if b"Server listening" in line:
            return
    raise AssertionError(said.decode())

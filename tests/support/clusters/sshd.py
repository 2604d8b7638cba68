"""A real sshd on a host made of namespaces, from Debian's packages, which are unpacked and not installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.clusters.debian_packages import libraries, unpacked
from support.network.namespaces import Host, Process
from support.patience import PATIENCE

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


@contextmanager
def serving(server: Host, cache: Path, directory: Path) -> Iterator[str]:
    """Have a host run sshd, and yield the command that reaches it from the other hosts of its network.

    Args:
        server: The host.
        cache: Keeps the packages.
        directory: Where keys and settings are written.

    Raises:
        Unavailable: The packages can't be had.
    """
    root = unpacked(cache, PACKAGES, "usr/sbin/sshd")
    client = root / "usr/bin/ssh"
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

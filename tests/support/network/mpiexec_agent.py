"""Program that mpiexec calls in place of ssh, between the hosts of :mod:`support.network.namespaces`."""

from __future__ import annotations

from pathlib import Path

from support.network.namespaces import Network

_AGENT = """#!/bin/sh
# What mpiexec takes for rsh: [options] host command...
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
esac
shift
exec nsenter -t $pid -n -m -u -i -p -- env TMPDIR=$directory sh -c "$*"
"""


def mpiexec_agent(network: Network, directory: Path) -> Path:
    """Return a program that mpiexec can call in place of rsh."""
    cases = "\n".join(f"{h.address}) pid={h.pid} directory={h.directory};;" for h in network.hosts)
    agent = directory / "agent"
    agent.write_text(_AGENT.format(cases=cases))
    agent.chmod(0o755)
    return agent

"""The launcher ``ssh``: an agent of ours on each host, over a remote shell."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import cast

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.command import default_python
from hvdlab.launch.host_agent.connection import ShellTransport
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.hosts import assign, is_local, parse_hosts
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.starter import Capabilities, Capability, LaunchRequest, RankObserver

SHELL = ("ssh",)


class SshLauncher:
    """Launcher that starts ranks on hosts that can be logged into without a password; those of this host without a shell."""

    name = "ssh"
    capabilities = Capabilities.all_but(
        {Capability.KEEP: "they end with the connections of the notebook to their hosts"}
    )
    forks = False

    def options(self) -> Sequence[Option]:
        """Return the options for the program started on the hosts, and its start."""
        return (
            Option("python", "interpreter of the ranks on every host (default: the path of this one)"),
            Option("shell", "command that runs a command on a host (default: ssh)", OptionKind.WORDS),
            Option(
                "host_names",
                "yes: ranks count as on one host if they were given the same name in hosts (sets HVDLAB_HOST)",
                OptionKind.SWITCH,
            ),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``InvalidRequestError`` for hosts that can't be read or lack slots, ``StartError`` without ssh."""
        if not hosts:
            raise InvalidRequestError("the launcher `ssh` needs hosts; name them as hosts='a:4,b:4'.")
        found = parse_hosts(hosts)
        assign(found, size)

    def is_far(self, hosts: str) -> bool:
        """Return True unless all hosts are this one."""
        return not all(is_local(host.name) for host in parse_hosts(hosts))

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> ExecStarter:
        """Return the starter of a job's ranks. Raises ``StartError`` if the shell that a host needs is missing."""
        hosts = (
            parse_hosts(request.hosts) if request.hosts else []
        )  # without hosts they are found while the job runs
        shell = cast("tuple[str, ...]", request.options.get("shell", SHELL))
        if any(not is_local(host.name) for host in hosts) and (not shell or shutil.which(shell[0]) is None):
            raise StartError(
                f"the launcher `ssh` needs `{shell[0] if shell else 'ssh'}`, which is not on the PATH; start it "
                "from a host that has it, or choose another launcher, such as local."
            )
        return ExecStarter(
            request,
            ranks,
            hosts,
            transport=ShellTransport(shell, names_hosts=bool(request.options.get("host_names"))),
            python=str(request.options.get("python") or default_python()),
        )

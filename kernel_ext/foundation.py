"""The processes that a pool stands on, chosen by where its launcher starts ranks and whether the pool is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable

from hvdlab.collectives import system
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.prestart import Base, Prestart


def address_for(hosts: Iterable[str]) -> str:
    """The address of this host by which ranks on other hosts reach it.

    Args:
        hosts: The names of those hosts; empty if only the launcher knows them.

    Raises:
        StartError, InvalidRequestError: There is no such address.
    """
    named = list(hosts)
    if chosen := system.chosen_address(os.environ):
        return chosen
    if named and all(system.is_loopback(system.address_towards(name) or "0.0.0.0") for name in named):
        return system.LOOPBACK
    return system.outward_address(named)


def base_for(
    local: bool, tcp_host: str | None, keep: bool, warm: Prestart | None, deadline: Deadline
) -> Base:
    """Take the processes that were started ahead, or start them; with a new coordinator if ranks are far or the pool is kept.

    Args:
        local: Ranks are forked here.
        tcp_host: Where ranks of other hosts reach the coordinator; None if there are none.
        keep: Whether the pool outlives this process.

    Raises:
        StartError: A process did not start in time; nothing is left behind.
    """
    if warm is None:
        warm = Prestart.begin(preload=local)
    base = warm.take(deadline)
    if tcp_host is None and not keep:
        return base
    # A coordinator learns only when it is started that it needs a TLS port for other hosts, or that it outlives this process.
    try:
        base.client.close()
        base.coordinator.close()
        base.coordinator = CoordinatorProcess.start(
            keep=True,
            linger=keep,
            tcp_host=tcp_host,
            timeout=deadline.remaining() or 10,
        )
        base.client = Client.connect(base.coordinator.address, base.coordinator.client_token)
    except BaseException:
        base.close()
        raise
    return base

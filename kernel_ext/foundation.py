"""What a pool stands on, as its launcher and its end need it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from hvdlab.collectives import addresses
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.prestart import Base, Prestart


def address_for(hosts: Iterable[str]) -> str:
    """The address of this host that ranks on these reach it by.

    Args:
        hosts: Their names; empty if only the launcher knows them.

    Raises:
        StartError, InvalidRequestError: There is none.
    """
    named = list(hosts)
    if chosen := addresses.chosen(os.environ):
        return chosen
    if named and all(addresses.is_loopback(addresses.towards(name) or "0.0.0.0") for name in named):
        return addresses.LOOPBACK
    return addresses.outward(named)


def base_for(
    local: bool, tcp_host: str | None, keep: bool, warm: Prestart | None, deadline: Deadline
) -> Base:
    """Take what was started ahead, or start it; with another coordinator if ranks are far or the pool is kept.

    Args:
        local: Ranks are forked here.
        tcp_host: Where ranks of other hosts reach the coordinator; None if there are none.
        keep: The pool outlives this process.

    Raises:
        StartError: It could not be had in time; nothing is left behind.
    """
    if warm is None:
        warm = Prestart.begin(preload=local)
    base = warm.take(deadline)
    if tcp_host is None and not keep:
        return base
    # Ranks of other hosts reach the coordinator by TLS only; one that is kept has to know from its start.
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

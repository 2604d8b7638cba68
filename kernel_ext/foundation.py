"""What a pool stands on, as its launcher and its end need it."""

from __future__ import annotations

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.warm.ahead import Base, WarmPool


def base_for(local: bool, far: bool, keep: bool, warm: WarmPool | None, deadline: Deadline) -> Base:
    """Take what was started ahead, or start it; with another coordinator if ranks are far or the pool is kept.

    Raises:
        StartError: It could not be had in time; nothing is left behind.
    """
    if warm is None:
        warm = WarmPool.begin(preload=local)
    base = warm.take(deadline)
    if not far and not keep:
        return base
    # Ranks of other hosts reach the coordinator by TLS only; one that is kept has to know from its start.
    try:
        base.client.close()
        base.coordinator.close()
        base.coordinator = CoordinatorProcess.start(
            keep=True,
            linger=keep,
            tcp_host="0.0.0.0" if far else None,
            timeout=deadline.remaining() or 10,
        )
        base.client = Client.connect(base.coordinator.address, base.coordinator.token)
    except BaseException:
        base.close()
        raise
    return base

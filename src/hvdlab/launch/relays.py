"""Whether the ranks of a host get a relay: one connection to the coordinator, in place of one for each rank."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlab.collectives.environment import World
from hvdlab.collectives.knobs import read
from hvdlab.launch.exec_agent import wire

ENOUGH = 8
"""Ranks of a host from which on a relay is worth its process, where the choice is left to hvdlab."""
DEAD_AFTER = 30.0


def wanted(world: World, host: str, ranks: int, environ: Mapping[str, str]) -> wire.RelayOrder | None:
    """The relay of a host that will have so many ranks, if it gets one.

    Only ranks of several hosts get one. On one host the coordinator sees of each rank whether its process lives, and hands its memory
    to the ranks; it could do neither through a relay.

    Args:
        world: The job, whose coordinator listens on the network if it has several hosts.
        host: Its name.
        ranks: How many ranks are started on the host.
        environ: Mapping in which users' variables are looked up.

    Raises:
        InvalidRequestError: A variable does not hold what it should.
    """
    if not world.relay_token or not world.coordinator.startswith("tls:"):
        return None
    values = read(environ)
    least = {"0": None, "1": 2, "auto": ENOUGH}[str(values.get("HVDLAB_RELAYS", "0"))]
    if least is None or ranks < least:
        return None
    dead_after = values.get("HVDLAB_DEAD_AFTER", DEAD_AFTER)
    assert isinstance(dead_after, float)
    return wire.RelayOrder(world.relay_token, world.certificate or "", host, dead_after)

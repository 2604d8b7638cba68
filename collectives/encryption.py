"""``HVDLAB_REQUIRE_ENCRYPTION``: a world in which data would travel between hosts in the clear does not come about.

hvdlab encrypts the coordinator's connections between hosts. Data goes over Gloo or MPI, which encrypt nothing, and how ranks find
each other is up to their launcher.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.messages import Hello, Member

VARIABLE = "HVDLAB_REQUIRE_ENCRYPTION"
"""The variable, as errors name it."""
EVERYTHING = "1"
"""The value with which no network counts as encrypted."""


def is_encrypted(required: str, address: str) -> bool:
    """Return whether this address is in one of the networks that the user has declared as encrypted."""
    if required == EVERYTHING:
        return False
    where = ipaddress.ip_address(address.split("%")[0])
    networks = map(ipaddress.ip_network, required.split(","))
    return any(where.version == network.version and where in network for network in networks)


def refusal(required: str, rank: int, hello: Hello, members: Iterable[Member], hosts: Collection[str]) -> str:
    """Return why a rank may not join these, or an empty text.

    Args:
        required: The value of the variable; empty if encryption is not required.
        rank: Number of the newcomer.
        hello: Its introduction.
        members: The ranks that are there.
        hosts: The hosts that they run on.
    """
    if not required or all(host == hello.host for host in hosts):
        return ""
    if len(hosts) > 1 and is_encrypted(required, hello.address):
        return ""  # the members were let in beside members on other hosts, so their addresses are encrypted
    for member in members:
        if member.host == hello.host:
            continue
        # Both ends: data is in the clear if one of them is outside the tunnel.
        for whose, address in ((rank, hello.address), (member.rank, member.address)):
            if not is_encrypted(required, address):
                return (
                    f"data between rank {rank} ({hello.host}) and rank {member.rank} ({member.host}) would travel unencrypted, "
                    f"since rank {whose} uses the address {address}; {VARIABLE}={required} forbids that. Lead it through a "
                    "tunnel (WireGuard, IPsec) and name the tunnel's network twice, as in "
                    f"{VARIABLE}=10.8.0.0/24 HVDLAB_ADDRESS=10.8.0.0/24, or run all ranks on one host"
                )
    return ""


def require_sealed_rendezvous(required: str, secret: str, launcher: str) -> None:
    """Raise ``StartError`` if ranks of several hosts would send each other the token in the clear."""
    if required and not secret:
        raise StartError(
            f"Ranks that {launcher} has started on several hosts tell each other how to join over connections, or in files, "
            f"that others may read; {VARIABLE}={required} forbids that. Give all ranks the same secret in HVDLAB_TOKEN, or a "
            "file of it in HVDLAB_TOKEN_FILE: then what they tell each other holds none. Or start them by `hvdlab run`."
        )

"""Nothing goes between hosts in the clear if the user forbids it: neither data, nor the addresses that ranks
exchange."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.engine.engine import introduction
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.planes import registry
from hvdlab.collectives.protocol import handshake
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.settings import Settings, read_variables
from hvdlab.collectives.time_limits import Deadline
from support.patience import PATIENCE

NETWORK = "10.8.0.0/24"


@pytest.mark.parametrize(
    ("text", "value"), [("0", ""), ("no", ""), ("1", "1"), ("10.8.0.7/24, fd00::/8", f"{NETWORK},fd00::/8")]
)
def test_the_variable_holds_yes_no_or_networks(text: str, value: str) -> None:
    assert read_variables({handshake.ENCRYPTION_VARIABLE: text})[handshake.ENCRYPTION_VARIABLE] == value


def test_another_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="0, 1, or networks such as"):
        read_variables({handshake.ENCRYPTION_VARIABLE: "wg0"})


def test_an_address_is_encrypted_in_a_tunnel_s_network_only() -> None:
    assert handshake.is_encrypted(NETWORK, "10.8.0.3")
    assert handshake.is_encrypted(f"{NETWORK},fd00::/8", "fd00::3%wg0")
    assert not handshake.is_encrypted(NETWORK, "10.9.0.3")
    assert not handshake.is_encrypted(NETWORK, "fd00::3")
    assert not handshake.is_encrypted("1", "10.8.0.3")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["10.8.0.1", "10.9.0.1"])), max_size=12))
def test_a_newcomer_is_refused_for_the_first_member_on_another_host_that_it_would_meet_in_the_clear(
    newcomers: list[tuple[str, str]],
) -> None:
    members: list[m.Member] = []
    for rank, (host, address) in enumerate(newcomers):
        in_the_clear = [
            member.rank
            for member in members
            if member.host != host and "10.9.0.1" in (address, member.address)
        ]
        hello = m.Hello(m.PROTOCOL_VERSION, "", "rank", rank, host, 7, address)
        hosts = {member.host for member in members}
        said = handshake.encryption_refusal(NETWORK, rank, hello, members, hosts)
        assert bool(said) == bool(in_the_clear)
        if said:
            assert f" and rank {in_the_clear[0]} (" in said
        else:
            members.append(m.Member(rank, host, 7, address))


def join(coordinator: CoordinatorProcess, rank: int, host: str, address: str) -> Endpoint:
    hello = m.Hello(
        m.PROTOCOL_VERSION, coordinator.token, "rank", rank, host, os.getpid(), address, planes=("gloo",)
    )
    return connect(coordinator.address, hello, deadline=Deadline(PATIENCE))[0]


def test_a_rank_of_another_host_is_refused_and_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.ENCRYPTION_VARIABLE, "1")
    with CoordinatorProcess.start(size=3) as coordinator:
        here = [join(coordinator, rank, "a", "10.1.0.1") for rank in (0, 1)]
        with pytest.raises(StartError) as caught:
            join(coordinator, 2, "b", "10.1.0.2")
        for endpoint in here:
            endpoint.close()
    said = str(caught.value)
    assert "data between rank 2 (b) and rank 0 (a) would travel unencrypted" in said
    assert f"{handshake.ENCRYPTION_VARIABLE}=10.8.0.0/24 HVDLAB_ADDRESS=10.8.0.0/24" in said


def test_through_a_tunnel_it_may_join_from_an_address_of_the_tunnel_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(handshake.ENCRYPTION_VARIABLE, NETWORK)
    with CoordinatorProcess.start(size=3) as coordinator:
        endpoints = [join(coordinator, 0, "a", "10.8.0.1"), join(coordinator, 1, "b", "10.8.0.2")]
        with pytest.raises(StartError, match=r"rank 2 uses the address 10\.1\.0\.3"):
            join(coordinator, 2, "c", "10.1.0.3")
        for endpoint in endpoints:
            endpoint.close()


def test_what_chooses_its_own_connections_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ("shm", "mpi", "gloo", "cuda/ipc", "cuda/nccl")
    monkeypatch.setattr(registry, "offered", lambda wish: every)
    assert introduction(Settings(), 0).planes == every
    assert introduction(Settings(require_encryption=NETWORK), 0).planes == ("shm", "gloo", "cuda/ipc")


def test_a_rendezvous_between_hosts_needs_a_secret_of_the_user_s() -> None:
    handshake.require_sealed_rendezvous("", "", "torchrun")
    handshake.require_sealed_rendezvous("1", "secret", "torchrun")
    with pytest.raises(StartError, match="Give all ranks the same secret in HVDLAB_TOKEN"):
        handshake.require_sealed_rendezvous("1", "", "torchrun")

"""Hostile bytes and messages in thousands, and a million in the soak; see ``support/fuzz/protocol.py`` to have one again."""

from __future__ import annotations

import random

import pytest

from hvdlab.collectives.coordinator.events import PeerConnected, Send, SendConfigure
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.protocol import codec
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.rendezvous.discovery import CoordinatorInfo
from hvdlab.launch.host_agent import wire
from support.effort import examples
from support.fuzz.protocol import (
    DECODERS,
    KINDS,
    make,
    one_conversation,
    one_failing_conversation,
    one_input,
    one_server,
    run,
)


@pytest.mark.timeout(3600)
def test_bytes_give_messages_or_a_protocol_error() -> None:
    run(one_input, examples(4000))


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_a_million_inputs() -> None:
    run(one_input, 1_000_000, start=1_000_000)


@pytest.mark.timeout(3600)
def test_whatever_peers_say_the_coordinator_goes_on() -> None:
    run(one_conversation, examples(600))


@pytest.mark.timeout(3600)
def test_whatever_handlers_raise_the_coordinator_goes_on_or_says_that_it_cannot() -> None:
    run(one_failing_conversation, examples(600))


@pytest.mark.timeout(3600)
def test_whatever_workers_say_a_parameter_server_answers_and_goes_on() -> None:
    run(one_server, examples(800))


@pytest.mark.parametrize(
    "data", [b"\xdd\0\0\0\1\xa7\0\0\0\0\0\0\x80", b"\x91" * 100_000, b'{"\xff": 1}', b"[" * 100_000]
)
def test_what_others_decode_is_garbage_to_them(data: bytes) -> None:
    """The card that ranks find each other by, and the messages of a launcher and its agents."""
    with pytest.raises(StartError):
        CoordinatorInfo.decode(data)
    for decode in (wire.decode_to_agent, wire.decode_from_agent):
        with pytest.raises(ProtocolError):
            decode(data)


def test_what_is_made_up_is_understood() -> None:
    """Otherwise the fuzzing would only test the first check."""
    chance = random.Random(1)
    for kind in KINDS:
        for _ in range(20):
            message = make(kind, chance, tame=True)
            payload = codec.encode(message)[4:]
            understood = 0
            for decode in DECODERS:
                try:
                    understood += decode(payload) is not None
                except ProtocolError:
                    continue
            assert understood, message


def test_a_number_that_fits_no_message_is_refused() -> None:
    """One above the highest rank would be given to the next rank that asks for one."""
    state = CoordinatorState(CoordinatorOptions())
    for peer, rank in enumerate(((1 << 64) - 1, -1), 1):
        effects = state.handle(PeerConnected(peer, m.Hello(1, "", "rank", rank)), 0.0)
        for effect in effects:
            if isinstance(effect, Send | SendConfigure):
                codec.encode(effect.message)
    assert list(state.membership.ranks) == [0]
    with pytest.raises(ProtocolError, match="can't be sent"):
        codec.encode(m.Ping(1 << 64))

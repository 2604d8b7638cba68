"""Hostile bytes under the pool's topics, in thousands, and a million in the soak; see ``support/fuzz/payload.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.errors import ProtocolError
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import decode_to_pool, decode_to_rank, encode
from support.effort import examples
from support.fuzz.payload import DECODERS, KINDS, make, one_input
from support.fuzz.protocol import run


@pytest.mark.timeout(3600)
def test_bytes_give_payloads_or_a_protocol_error() -> None:
    run(one_input, examples(4000))


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_a_million_inputs() -> None:
    run(one_input, 1_000_000, start=1_000_000)


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=80))
def test_garbage_is_refused_as_such(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        assert isinstance(decode(data), Payload)
    except ProtocolError:
        return


@pytest.mark.parametrize("data", [b"", b"\xdd\0\0\0\1\xa7\0", b"\x91" * 100_000, b"\x92\xa6Settle\xa1\xff"])
def test_nesting_and_bad_text_are_refused(data: bytes) -> None:
    for decode in (decode_to_rank, decode_to_pool):
        with pytest.raises(ProtocolError):
            decode(data)


def test_what_is_made_up_is_understood() -> None:
    """Otherwise the fuzzing would only test the first check."""
    chance = random.Random(1)
    for kind in KINDS:
        understood = 0
        for _ in range(20):
            body = encode(make(kind, chance))
            for decode in DECODERS:
                try:
                    understood += type(decode(body)) is kind
                except ProtocolError:
                    continue
        assert understood, kind

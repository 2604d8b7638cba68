"""Fingerprints of blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from hvdlab.bindings.fingerprints import differing, fingerprint, of_blocks


@given(st.binary(min_size=1, max_size=50), st.integers(1, 60), st.data())
def test_the_blocks_that_differ_are_found(ours: bytes, block: int, data: st.DataObject) -> None:
    theirs = bytearray(ours)
    place = data.draw(st.integers(0, len(ours) - 1))
    theirs[place] ^= 1

    def blocks(of: bytes) -> bytes:
        return of_blocks(len(of), lambda offset, length: of[offset : offset + length], block=block)

    assert differing(blocks(ours), blocks(ours)) == []
    assert differing(blocks(ours), blocks(bytes(theirs))) == [place // block]


def test_threads_change_nothing() -> None:
    data = bytes(range(256)) * 100
    with ThreadPoolExecutor(3) as pool:
        many = of_blocks(
            len(data), lambda offset, length: data[offset : offset + length], block=999, pool=pool
        )
    assert many == of_blocks(len(data), lambda offset, length: data[offset : offset + length], block=999)
    assert many[:20] == fingerprint(data[:500], data[500:999])


def test_nothing_has_no_blocks() -> None:
    assert of_blocks(0, lambda offset, length: b"") == b""

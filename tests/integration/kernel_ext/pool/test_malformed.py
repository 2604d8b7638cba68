"""Malformed input: bytes that are no message, and text of the operating system that is no UTF-8."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.rendezvous.discovery import CoordinatorInfo
from hvdlab.collectives.tracing import record_format
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.registry import KeptPoolEntry, KeptPoolRegistry, Process
from hvdlab.launch.forkserver.messages import (
    Children,
    Exited,
    Fork,
    Forked,
    Guard,
    Loaded,
    decode_from_server,
    decode_to_server,
    encode,
)
from hvdlab.launch.host_agent import wire

StartPool = Callable[..., Pool]
Decode = Callable[[bytes], object]

START = wire.Start((b"python", b"-c"), b"/d", {b"A": b"b"}, ("C",), b"f", 2, 0, "unix:/a", ("lo",))
CARD = CoordinatorInfo(2, "host", "unix:/a", "tls:a:1", "c", "t")

WHOLE: list[tuple[Decode, bytes]] = [
    (decode_to_server, encode(Fork.of(3, {"A": "b"}, "/d", ("", "/lib"), ("--x",)))[4:]),
    (decode_to_server, encode(Guard(("/a", "/b")))[4:]),
    (decode_from_server, encode(Loaded(("torch",), {"a": "no module"}, 0.5))[4:]),
    (decode_from_server, encode(Exited(1, 2, -1, 9, 3, True, "last words"))[4:]),
    (decode_from_server, encode(Children((Forked(1, 2, 3, 4, 5),), ("/a",)))[4:]),
    (wire.decode_to_agent, wire.encode(START)[4:]),
    (wire.decode_to_agent, wire.encode(wire.Spawn((wire.RankSpec(1, {"A": "b"}),)))[4:]),
    (wire.decode_from_agent, wire.encode(wire.RankNotStarted(1, 127, "not found"))[4:]),
    (CoordinatorInfo.decode, CARD.encode()),
]


@pytest.mark.parametrize(("decode", "whole"), WHOLE)
def test_messages_are_read_as_they_were_written(decode: Decode, whole: bytes) -> None:
    message = decode(whole)
    assert decode(whole) == message


@pytest.mark.parametrize(
    "decode", dict.fromkeys([*(decode for decode, _ in WHOLE), record_format.decode, record_format.read_head])
)
@given(data=st.binary(max_size=80))
def test_garbage_is_refused_as_such(decode: Decode, data: bytes) -> None:
    with pytest.raises((ProtocolError, StartError)):
        decode(data)


@pytest.mark.parametrize(("decode", "whole"), WHOLE)
@given(data=st.data())
def test_a_message_with_wrong_bytes_is_one_or_is_refused(
    decode: Decode, whole: bytes, data: st.DataObject
) -> None:
    wrong = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(wrong) - 1))
        wrong[place] = data.draw(st.sampled_from([0x00, 0x80, 0xC0, 0xFF]) | st.integers(0, 255))
    # Changed bytes may still be a message; any error but these two fails the test.
    with contextlib.suppress(ProtocolError, StartError):
        decode(bytes(wrong[: data.draw(st.integers(1, len(wrong)))]))


# -- text of the operating system -------------------------------------------------------------------------------------


def test_directory_environment_and_path_need_not_be_utf8() -> None:
    odd = os.fsdecode(b"a\xffb")
    order = decode_to_server(encode(Fork.of(3, {odd: odd}, odd, (odd,)))[4:])
    assert order == Fork(3, {b"a\xffb": b"a\xffb"}, b"a\xffb", (b"a\xffb",))


def test_a_pool_starts_where_names_are_no_utf8(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"Entw\xfcrfe")
    odd.mkdir()
    (odd / "mine.py").write_text("x = 7\n")
    monkeypatch.chdir(odd)
    monkeypatch.setenv("ODD", odd.name)
    monkeypatch.syspath_prepend(str(odd))
    pool = start_pool(1)
    found = pool.run("import os, mine\n(os.getcwdb(), os.environb[b'ODD'], mine.x)")
    assert found[0] == (os.fsencode(odd), b"Entw\xfcrfe", 7)
    assert pool.cluster.controller.running


# -- kept pools -------------------------------------------------------------------------------------------------------


def test_a_pool_of_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    me, nobody = Process.of(os.getpid()), Process(0, 0)
    fields = ("mine", 2, "shm", 0.0, "unix:/a", "t", str(tmp_path / "d"), me, me, "/p", ("h", 1), nobody, "")
    KeptPoolRegistry().write(KeptPoolEntry(*fields, version="0.0.9"))
    with pytest.raises(StartError, match=r"runs hvdlab 0\.0\.9, .*`hvdlab pools stop mine`"):
        Pool.attach("mine")
    assert KeptPoolRegistry().get("mine").owner == nobody

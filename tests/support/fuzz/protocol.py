"""Hostile bytes for the frame decoder and the codec, and hostile messages for the coordinator's state, from seeds.

::

    python tests/support/fuzz/protocol.py --count 1000000          # inputs for the decoder and the codec
    python tests/support/fuzz/protocol.py --states 10000           # conversations with the coordinator's state
    python tests/support/fuzz/protocol.py --servers 10000          # and with a parameter server's
"""

from __future__ import annotations

import argparse
import contextlib
import random
import struct
import time
import types
import typing
from collections.abc import Callable
from typing import Any, get_args, get_origin
from unittest import mock

import msgspec
import numpy as np

from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import CLIENT_HANDLERS, RANK_HANDLERS, CoordinatorState
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.kvstore.optimizers import SGD, Adam, portable
from hvdlab.collectives.kvstore.servers import messages as kv
from hvdlab.collectives.kvstore.servers import state as servers
from hvdlab.collectives.kvstore.servers.memory import SharedFile
from hvdlab.collectives.protocol import codec
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import FrameDecoder
from hvdlab.collectives.types import OpKind

LIMIT = 4096
"""Largest frame that is accepted here."""
DECODERS: tuple[Callable[[bytes], m.Message], ...] = (
    codec.decode_hello,
    codec.decode_from_rank,
    codec.decode_from_client,
    codec.decode_to_peer,
)
FROM_RANK: tuple[type[m.Message], ...] = get_args(m.FromRank)
FROM_CLIENT: tuple[type[m.Message], ...] = get_args(m.FromClient)
KINDS = tuple({*FROM_RANK, *FROM_CLIENT, *get_args(m.ToPeer)})
_INTEGERS = (-1, 0, 0, 1, 1, 2, 3, 7, 255, 1 << 20, (1 << 31) - 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_TEXTS = ("", "a", "b", "allreduce.noname", "\x00", "é" * 9, "x" * 300, "interrupted")
_COMMON = tuple(kind for kind in (*FROM_RANK, *FROM_CLIENT) if kind not in (m.Hello, m.Bye))
_HINTS: dict[type, dict[str, Any]] = {}


# -- messages -----------------------------------------------------------------------------------------------------


def some(kind: Any, chance: random.Random, *, tame: bool = False) -> Any:
    """Return a value of a field's type; a tame one is small enough to mean something."""
    if kind is bool:
        return chance.random() < 0.5
    if kind is int:
        return chance.randint(0, 3) if tame and chance.random() < 0.95 else chance.choice(_INTEGERS)
    if kind is float:
        return chance.choice((0.0, 0.5, -1.0, 1e300, float("inf"), float("nan")))
    if kind is str:
        return chance.choice(_TEXTS)
    if kind is bytes:
        return chance.randbytes(chance.choice((0, 1, 16, 40)))
    if get_origin(kind) is tuple:
        items = [a for a in get_args(kind) if a is not Ellipsis]
        if len(items) > 1:
            return tuple(some(item, chance, tame=tame) for item in items)
        return tuple(some(items[0], chance, tame=tame) for _ in range(chance.choice((0, 1, 1, 2, 3))))
    if isinstance(kind, types.UnionType):
        chosen = chance.choice(get_args(kind))
        return None if chosen is types.NoneType else some(chosen, chance, tame=tame)
    if get_origin(kind) is list:
        return [some(get_args(kind)[0], chance, tame=tame) for _ in range(chance.randint(0, 2))]
    if get_origin(kind) is dict:
        return {some(str, chance): some(str, chance) for _ in range(chance.randint(0, 2))}
    return make(kind, chance, tame=tame)


def make(kind: type, chance: random.Random, *, tame: bool = False) -> Any:
    """Return a message, or a part of one, with any values of the right types."""
    hints = _HINTS.get(kind)
    if hints is None:
        hints = _HINTS[kind] = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: some(hints[field.name], chance, tame=tame)
            for field in msgspec.structs.fields(kind)
            if field.required or chance.random() < 0.7
        }
    )


# -- bytes --------------------------------------------------------------------------------------------------------


def spoil(data: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, added, left out or moved."""
    spoiled = bytearray(data)
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(spoiled) + 1)
        action = chance.randrange(6)
        if action == 0 and place < len(spoiled):
            spoiled[place] ^= 1 << chance.randrange(8)
        elif action == 1:
            spoiled[place:place] = chance.randbytes(chance.randint(1, 8))
        elif action == 2:
            del spoiled[place : place + chance.randint(1, 8)]
        elif action == 3:
            del spoiled[place:]
        elif action == 4 and len(spoiled) >= 4:
            spoiled[:4] = struct.pack("<I", chance.choice((0, 1, LIMIT, LIMIT + 1, 1 << 31, (1 << 32) - 1)))
        elif action == 5 and place < len(spoiled):
            spoiled[place] = chance.choice((0xC1, 0xDD, 0xDF, 0xDB, 0xC6, 0x9F, 0x00, 0xFF))
    return bytes(spoiled)


def one_input(chance: random.Random) -> None:
    """Decode bytes that are sometimes frames, in pieces. Nothing may come of them but messages and
    ``ProtocolError``."""
    if chance.random() < 0.2:
        data = chance.randbytes(chance.randrange(60))
    else:
        frames = [codec.encode(make(chance.choice(KINDS), chance)) for _ in range(chance.choice((1, 1, 2)))]
        data = spoil(b"".join(frames), chance)
    decoder = FrameDecoder(LIMIT)
    decode = chance.choice(DECODERS)
    start = 0
    try:
        while start < len(data):
            stop = start + chance.choice((1, 3, 4, 5, 17, len(data)))
            for payload in decoder.feed(data[start:stop]):
                assert 0 < len(payload) <= LIMIT
                message = decode(payload)  # type: ignore[arg-type]  # any buffer will do
                assert isinstance(message, m.Message)
                codec.encode(message)
            assert decoder.unfinished <= LIMIT + 4
            start = stop
    except ProtocolError:
        return


# -- conversations ------------------------------------------------------------------------------------------------


def one_conversation(chance: random.Random) -> None:
    """Play peers with the token that send any messages, in any order: the coordinator drops them, but never fails
    itself."""
    options = CoordinatorOptions(
        size=chance.choice((None, 2, 3)), incarnation=chance.choice((0, 0, 1)), reattach=1.0
    )
    _converse(CoordinatorState(options), chance)


def one_failing_conversation(chance: random.Random) -> None:
    """Let handlers fail, before or after they change the state: the sender's connection ends, and all others go on.

    Only a state that itself reports that it is unsound may be broken afterwards.
    """
    state = CoordinatorState(CoordinatorOptions(size=chance.choice((None, 2, 3)), reattach=1.0))
    failing = chance.sample(_HANDLERS, 4)
    with contextlib.ExitStack() as undo:
        for table, kind in failing:
            handler = _Failing(table[kind], chance, state)
            undo.enter_context(mock.patch.dict(table, {kind: handler}))
        _converse(state, chance)


class _Failing:
    """Handler that sometimes raises: instead of its work, after it, or with a broken state left behind."""

    def __init__(self, works: Callable[..., None], chance: random.Random, state: CoordinatorState) -> None:
        self._works, self._chance, self._state = works, chance, state

    def __call__(self, *arguments: Any) -> None:
        way = self._chance.random()
        if way < 0.7:
            self._works(*arguments)
        if way > 0.97:
            self._state.blocked.add(99)
        if way > 0.4:
            raise ZeroDivisionError("made to fail")


_HANDLERS: list[tuple[dict[Any, Any], type]] = [
    (table, kind) for table in (RANK_HANDLERS, CLIENT_HANDLERS) for kind in table
]


def _converse(state: CoordinatorState, chance: random.Random) -> None:
    now, peers = 0.0, 0
    connected: dict[int, bool] = {}
    for _ in range(chance.randint(1, 40)):
        now += chance.choice((0.0, 0.0, 0.1, 1.0, 11.0))
        action = chance.random()
        if action < 0.15 or not connected:
            peers += 1
            hello = _hello(peers, chance)
            connected[peers] = hello.role == "client"
            event: Any = PeerConnected(peers, hello)
        elif action < 0.2:
            event = PeerLost(connected.popitem()[0], "end of file")
        elif action < 0.25:
            event = Tick()
        else:
            peer = chance.choice(list(connected))
            if not connected[peer] and chance.random() < 0.4:
                message = _sensible(make(m.Announce, chance, tame=True), state, chance)
            else:
                kinds = _COMMON if chance.random() < 0.9 else (m.Hello, m.Bye)
                allowed = FROM_CLIENT if connected[peer] else FROM_RANK
                kind = chance.choice([kind for kind in kinds if kind in allowed])
                message = make(kind, chance, tame=chance.random() < 0.95)
            event = Received(peer, message)
        for effect in state.handle(event, now):
            if isinstance(effect, CloseConnection):
                connected.pop(effect.peer, None)
            elif isinstance(effect, Send | SendConfigure):
                with contextlib.suppress(ProtocolError):  # the server leaves those out
                    codec.encode(effect.message)
        if state.unsound:
            return  # the server ends, and a successor begins
        state.validate_state()


class _Outbox:
    """Outbox of a few pages, shared or not."""

    def __init__(self, *, remote: bool) -> None:
        self.file, self.remote = SharedFile.create("fuzz"), remote
        self.file.grow(4096)
        self.array = self.file.array

    def write(self, offset: int, data: bytes) -> None:
        if not self.remote:
            raise ProtocolError("it is shared")
        if offset > 1 << 40:
            raise MemoryError
        self.array(offset, np.dtype(np.uint8), (len(data),))[:] = np.frombuffer(data, np.uint8)


FROM_WORKER: tuple[type[m.Message], ...] = get_args(kv.FromWorker)
_OPTIMIZERS = tuple(portable(one) for one in (SGD(), SGD(momentum=0.5), Adam(begin_num_update=3)))


def one_server(chance: random.Random) -> None:
    """Play workers with the token that send any bytes: each request is answered, a connection ends at worst, and the
    server goes on."""
    state, now = servers.ParameterServerState(), 0.0
    outboxes = [_Outbox(remote=chance.random() < 0.3) for _ in range(3)]
    peers: dict[int, int] = {}
    workers = (0, 1, 2)
    try:
        for step in range(chance.randint(4, 60)):
            now += chance.choice((0.0, 0.0, 0.1, 1.0, 11.0))
            action, rank = chance.random(), step if step < 3 else chance.randrange(3)
            if step < 3 or action < 0.05:
                event: Any = servers.WorkerArrived(step, rank, 7, outboxes[rank])
                peers[step] = rank
            elif action < 0.1 or not peers:
                event = servers.ServerTick()
            elif action < 0.13:
                event = servers.WorkerDisconnected(chance.choice(list(peers)))
            elif action < 0.15:
                event = servers.WorkerDied(rank, 7, "killed")
            else:
                message = _from_worker(chance, step, workers, first=step < 6)
                file = _brought(chance) if isinstance(message, kv.Bring) else None
                event = servers.ServerReceived(chance.choice(list(peers)), message, file)
            answered = set()
            for effect in state.handle(event, now):
                if isinstance(effect, servers.Disconnect):
                    peers.pop(effect.peer, None)
                else:
                    kv.encode(effect.message)
                    answered.add((effect.peer, getattr(effect.message, "sequence", None)))
            # A store's first requests may wait for its memory.
            if isinstance(event, servers.ServerReceived) and isinstance(event.message, _ANSWERED_AT_ONCE):
                waits = outboxes[peers.get(event.peer, 0)].remote
                assert waits or event.peer not in peers or (event.peer, event.message.sequence) in answered
            state.next_tick()
            state.stock()
    finally:
        state.close()


_ANSWERED_AT_ONCE = (kv.Push, kv.Pull, kv.Init, kv.SetOptimizer, kv.StockRequest)


def _brought(chance: random.Random) -> SharedFile | None:
    """Return memory of a store as a worker brings it: new, sometimes of another kind, or missing."""
    if chance.random() < 0.05:
        return None
    file = SharedFile.create("fuzz")
    if chance.random() < 0.1:
        file.grow(4096)
        words = file.array(0, np.dtype(np.uint64), (64,))
        words[:8] = (
            0x6876646B76310003,
            chance.choice((64, 4096)),
            chance.choice((0, 0, 64, 65)),
            0,
            0,
            0,
            0,
            0,
        )
        words[8:] = [chance.choice((0, 1, 8, chance.getrandbits(64))) for _ in range(56)]
    return file


def _from_worker(chance: random.Random, step: int, workers: tuple[int, ...], *, first: bool) -> Any:
    """Return a message of a worker; mostly one that gets further than the door."""
    if first:
        return kv.Bring(0) if step == 3 else kv.OpenStore(step, 0, workers)
    kind = chance.choice(FROM_WORKER)
    message = make(kind, chance, tame=chance.random() < 0.9)
    fields = set(kind.__struct_fields__)
    changes: dict[str, Any] = {}
    if "sequence" in fields and chance.random() < 0.9:
        changes["sequence"] = step
    if "store" in fields and chance.random() < 0.9:
        changes["store"] = 0
    if "key" in fields and chance.random() < 0.9:
        changes["key"] = chance.choice("ab")
    if "dtype" in fields and chance.random() < 0.8:
        changes["dtype"] = chance.choice(("f2", "f4", "f8", "i8", "b1"))
    if "offset" in fields and chance.random() < 0.8:
        changes["offset"] = 8 * chance.randrange(64)
    if "optimizer" in fields and chance.random() < 0.8:
        optimizer = chance.choice(_OPTIMIZERS)
        if chance.random() < 0.5:
            name = chance.choice(list(optimizer.settings))
            optimizer = msgspec.structs.replace(
                optimizer,
                settings={**optimizer.settings, name: chance.choice((None, -1, 1 << 63, "x", 0.5, []))},
            )
        changes["optimizer"] = optimizer
    return msgspec.structs.replace(message, **changes)


def _hello(peer: int, chance: random.Random) -> m.Hello:
    if chance.random() < 0.1:
        return make(m.Hello, chance, tame=True)  # type: ignore[no-any-return]  # of this kind
    role = chance.choice(("rank", "rank", "rank", "client"))
    tracked = chance.random() < 0.5
    return m.Hello(1, "", role, (peer - 1) % 3, "h", peer, planes=("shm", "gloo"), cells_tracked=tracked)


def _sensible(message: m.Announce, state: CoordinatorState, chance: random.Random) -> m.Announce:
    """Return an announcement that gets further than the door."""
    generation = state.sets.world.generation
    if chance.random() < 0.1:
        return msgspec.structs.replace(message, process_set=0, generation=generation)
    definitions = tuple(
        msgspec.structs.replace(
            definition,
            local=i,
            signature=msgspec.structs.replace(
                definition.signature,
                kind=int(chance.choice(list(OpKind))),
                shape=(4,),
                name=chance.choice("abc"),
                dtype=8,
            ),
        )
        for i, definition in enumerate(message.definitions)
    )
    locals = tuple(range(len(definitions)))
    return msgspec.structs.replace(
        message, process_set=0, generation=generation, locals=locals, definitions=definitions, extra=()
    )


# -- many ---------------------------------------------------------------------------------------------------------


def run(one: Callable[[random.Random], None], count: int, start: int = 0) -> None:
    """Try so many; raise the error, with the seed."""
    for seed in range(start, start + count):
        try:
            one(random.Random(seed))
        except Exception as error:
            error.add_note(f"seed {seed} of {one.__name__}")
            raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--states", type=int, default=0)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    given = parser.parse_args()
    tries = (
        (one_input, given.count),
        (one_conversation, given.states),
        (one_failing_conversation, given.states),
        (one_server, given.servers),
    )
    for one, count in tries:
        begin = time.monotonic()
        run(one, count, given.start)
        print(f"{one.__name__}: {count} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

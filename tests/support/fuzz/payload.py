"""Hostile bytes in the messages between the pool and its ranks, from seeds.

::

    python tests/support/fuzz/payload.py --count 1000000
"""

from __future__ import annotations

import argparse
import random
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from hvdlab.collectives.errors import ProtocolError
from hvdlab.kernel_ext.wire import codec
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import decode_to_pool, decode_to_rank, encode
from support.fuzz.protocol import run, some, spoil

DECODERS: tuple[Callable[[bytes], Any], ...] = (decode_to_rank, decode_to_pool)
KINDS: tuple[type[Payload], ...] = (*get_args(codec.ToRank), *get_args(codec.ToPool))
_HINTS: dict[type, dict[str, Any]] = {}


def value(kind: Any, chance: random.Random) -> Any:
    """Return a value of a field's type."""
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return value(chance.choice(get_args(kind)), chance)
    if kind is type(None):
        return None
    if kind is typing.Any:
        return chance.choice((None, 1, "a", b"b"))
    if origin is typing.Literal:
        return chance.choice(get_args(kind))
    if origin is dict:
        key, item = get_args(kind)
        return {value(key, chance): value(item, chance) for _ in range(chance.randint(0, 2))}
    if origin is tuple:
        items = get_args(kind)
        if items[-1] is Ellipsis:
            items = (items[0],) * chance.choice((0, 1, 1, 3))
        return tuple(value(item, chance) for item in items)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return make(kind, chance)
    return some(kind, chance)


def make(kind: type, chance: random.Random) -> Any:
    """Return a payload, or a part of one, with any values of the right types."""
    hints = _HINTS.get(kind)
    if hints is None:
        hints = _HINTS[kind] = typing.get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    given = [field for field in fields if field.required or chance.random() < 0.7]
    return kind(**{field.name: value(hints[field.name], chance) for field in given})


def one_input(chance: random.Random) -> None:
    """Decode bytes that are sometimes payloads. Nothing may come of them but payloads and ``ProtocolError``."""
    if chance.random() < 0.2:
        data = chance.randbytes(chance.randrange(60))
    else:
        data = spoil(encode(make(chance.choice(KINDS), chance)), chance)
    try:
        payload = chance.choice(DECODERS)(data)
    except ProtocolError:
        return
    assert isinstance(payload, Payload)
    encode(payload)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0)
    arguments = parser.parse_args()
    run(one_input, arguments.count, arguments.start)


if __name__ == "__main__":
    main()

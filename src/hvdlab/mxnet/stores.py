"""hvdlab's stores ``horovod`` and ``byteps`` as stores of MXNet's, for ``mx.kv.create`` and ``gluon.Trainer``."""

from __future__ import annotations

import mxnet as mx  # pyright: ignore[reportMissingImports]
from hvdlab import kvstore


class Horovod(kvstore.Horovod, mx.kvstore.KVStoreBase):  # type: ignore[misc]  # MXNet has no types
    __doc__ = kvstore.Horovod.__doc__


class BytePS(kvstore.BytePS, mx.kvstore.KVStoreBase):  # type: ignore[misc]  # MXNet has no types
    __doc__ = kvstore.BytePS.__doc__


def register_stores() -> None:
    """Let ``mx.kv.create`` make stores of the types ``horovod`` and ``byteps``.

    MXNet 1.9.1 has neither and makes a local store of these names. ``gluon.Trainer`` makes no store at all of a name where a
    parameter has one context: give it the store that ``mx.kv.create("horovod")`` returns.
    """
    for store in (Horovod, BytePS):
        mx.kvstore.KVStoreBase.register(store)

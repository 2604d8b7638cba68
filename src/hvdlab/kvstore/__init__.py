"""MXNet's key-value store for arrays of any framework: ``from hvdlab import kvstore; kv = kvstore.create("device")``.

See :func:`create` for the types of stores, :class:`KVStore` for their operations, and ``optimizer`` for the optimizers that run on their values.
Arrays are numpy's, torch's, TensorFlow's, cupy's or MXNet's, or any writable buffer; numbers and lists of numbers are not.

Example:
    >>> import numpy as np
    >>> from hvdlab import kvstore
    >>> kv = kvstore.create("local")
    >>> weight = np.zeros(2)
    >>> kv.init("weight", weight)
    >>> kv.push("weight", [np.ones(2), np.ones(2)])
    >>> kv.pull("weight", out=weight)
    >>> weight
    array([2., 2.])
"""

from __future__ import annotations

from hvdlab.bindings.kvstore_arrays import register_frameworks
from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.allreduce_stores import BytePS, Horovod, PushPull
from hvdlab.collectives.kvstore.arrays import ArrayType, RowSparse, register_array_type
from hvdlab.collectives.kvstore.base import KVStoreBase, TestStore
from hvdlab.collectives.kvstore.factory import TYPES, create
from hvdlab.collectives.kvstore.local_store import KVStore, ServerInfo
from hvdlab.collectives.kvstore.server_store import KVStoreServer
from hvdlab.kvstore import lr_scheduler, optimizer

register_frameworks()

__all__ = [
    "TYPES",
    "ArrayType",
    "BytePS",
    "Horovod",
    "KVStore",
    "KVStoreBase",
    "KVStoreError",
    "KVStoreServer",
    "PushPull",
    "RowSparse",
    "ServerInfo",
    "TestStore",
    "create",
    "lr_scheduler",
    "optimizer",
    "register_array_type",
]

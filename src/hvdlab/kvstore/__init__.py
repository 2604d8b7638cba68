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

from typing import Any

from hvdlab.bindings.kvstore_arrays import register_frameworks
from hvdlab.collectives import basics
from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.allreduce_stores import BytePS, DistSyncStore, Horovod, PushPull, RankStore
from hvdlab.collectives.kvstore.arrays import ArrayType, RowSparse, register_array_type
from hvdlab.collectives.kvstore.base import KVStoreBase, TestStore
from hvdlab.collectives.kvstore.local_store import KVStore, ServerInfo
from hvdlab.collectives.kvstore.server_store import KVStoreServer, ServerStore
from hvdlab.collectives.process_sets import ProcessSet
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

_LOCAL = ("local", "local_update_cpu", "local_allreduce_cpu")
_DEVICE = ("device", "local_allreduce_device")
_SYNC = ("dist_sync", "dist")
_DEVICE_SYNC = ("dist_device_sync", "dist_sync_device")
_ASYNC = ("dist_async",)
_DEVICE_ASYNC = ("dist_device_async", "dist_async_device")
_NO_WORKERS = "a {!r} store is of one process, so a process set means nothing to it: leave it out, or use dist_sync or dist_async"
TYPES = (
    *_LOCAL,
    *_DEVICE,
    "nccl",
    *_SYNC,
    *_DEVICE_SYNC,
    *_ASYNC,
    *_DEVICE_ASYNC,
    "horovod",
    "byteps",
    "teststore",
)
"""Names that :func:`create` knows from the start; classes that are registered come to these."""


def create(name: str = "local", process_set: ProcessSet | None = None) -> Any:
    """Make a key-value store.

    ========================================================= =====================================================
    ``local``, ``local_update_cpu``, ``local_allreduce_cpu``  one process, arrays of a push summed on the CPU
    ``device``, ``local_allreduce_device``                    the same in the order of devices; can compress gradients
    ``nccl``                                                  as ``device``, where there is a plane for CUDA tensors
    ``dist_sync``, ``dist``                                   summed over the workers, too; every worker has the values
    ``dist_device_sync``, ``dist_sync_device``                the same, arrays of one worker summed as ``device`` does
    ``dist_async``                                            values on servers, each push applied by the optimizer at once
    ``dist_device_async``, ``dist_async_device``              the same, arrays of one worker summed as ``device`` does
    ``horovod``, ``byteps``                                   sums over the workers, nothing stored
    ``teststore``                                             the pattern for stores of one's own
    ========================================================= =====================================================

    Args:
        name: The type, in any case; or the name of a class given to :meth:`KVStoreBase.register`. Stores of types with
            workers join the world, and every worker makes them in the same order.
        process_set: The ranks that are the store's workers, for types that have some; all ranks by default. Only these make it, and
            ``rank`` and ``num_workers`` count in it.

    Returns:
        The store: a :class:`KVStore`, or an instance of the registered class.

    Raises:
        TypeError: ``name`` is not a str.
        ValueError: There is no such type; the text lists those that there are.
        KVStoreError: ``nccl``, and there is no plane for CUDA tensors here; or this rank is not in the process set, or the type has no
            workers.
        InvalidRequestError: The process set is not registered.
        AbortedError: Another worker failed before it had made the store.
    """
    if not isinstance(name, str):
        raise TypeError("name must be a string")
    wanted = name.lower()
    if wanted in KVStoreBase.kv_registry:
        made = KVStoreBase.kv_registry[wanted]
        if process_set is None:
            return made()
        if issubclass(made, RankStore):
            return made(process_set)
        raise KVStoreError(_NO_WORKERS.format(name))
    return create_native(wanted, KVStore, DistSyncStore, ServerStore, process_set)


def create_native(
    wanted: str,
    one_process: type[KVStore],
    synchronous: type[DistSyncStore],
    served: type[ServerStore],
    process_set: ProcessSet | None = None,
) -> KVStore:
    """Return a new store of a type that is no registered class.

    Args:
        wanted: The type, in lower case.
        one_process: The class of stores of one process.
        synchronous: The class of stores whose rounds end when all workers have pushed, and whose values every worker has.
        served: The class of stores whose values are on servers.
        process_set: The process set whose ranks are the workers; ``None`` for all ranks.

    Raises:
        ValueError, KVStoreError: As :func:`create` does.
    """
    if process_set is not None and wanted in (*_LOCAL, *_DEVICE, "nccl"):
        raise KVStoreError(_NO_WORKERS.format(wanted))
    if wanted in _LOCAL:
        return one_process(wanted)
    if wanted in _DEVICE:
        return one_process(wanted, on_devices=True)
    if wanted == "nccl":
        if not (basics.nccl_built() or basics.cuda_built()):
            raise KVStoreError(
                "nccl stores need a CUDA device and hvdlab's plane for it, and here is none "
                "(MXNet says: compile with USE_NCCL=1). Use 'device', which adds in the same order."
            )
        return one_process(wanted, on_devices=True)
    if wanted in _SYNC or wanted in _DEVICE_SYNC:
        return synchronous(wanted, on_devices=wanted in _DEVICE_SYNC, process_set=process_set)
    if wanted in _ASYNC or wanted in _DEVICE_ASYNC:
        return served(wanted, on_devices=wanted in _DEVICE_ASYNC, process_set=process_set)
    known = sorted({*TYPES, *KVStoreBase.kv_registry})
    raise ValueError(f"there is no key-value store {wanted!r}; known are {', '.join(known)}")

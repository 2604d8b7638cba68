"""Collectives on numpy arrays, buffers and DLPack objects: ``import hvdlab.numpy as hvd``.

Names and signatures are Horovod's as far as they fit; see :mod:`hvdlab.numpy.ops`.

Example:
    >>> import numpy as np
    >>> import hvdlab.numpy as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> hvd.allreduce(np.array([1.0, 2.0]), op=hvd.Sum)
    array([1., 2.])
    >>> hvd.shutdown()
"""

from __future__ import annotations

from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.handles import Handle, poll, synchronize
from hvdlab.bindings.monitoring import export, metric
from hvdlab.bindings.objects import allgather_object, broadcast_object
from hvdlab.collectives.basics import init, is_initialized, local_rank, local_size, rank, shutdown, size
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdlab.numpy.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "export",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metric",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]

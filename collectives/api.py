"""The name under which hvdlab's numpy binding was first known; see :mod:`hvdlab.numpy.ops`.

Nothing of ``collectives`` uses it: it only forwards to a room above.
"""

from __future__ import annotations

from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.handles import Handle, poll, synchronize
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.metrics.export_from_rank import export
from hvdlab.collectives.metrics.record import metric
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

Operation = Handle

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Operation",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
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
    "export",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "metric",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

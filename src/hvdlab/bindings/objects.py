"""Python objects from one rank to all, or from all to all.

They travel as cloudpickle through the data plane, between the user's own ranks.
"""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import numpy.typing as npt

from hvdlab.bindings.arguments import broadcasting
from hvdlab.collectives import context
from hvdlab.collectives.context import core_rank, own_number
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.planes.base import host_view
from hvdlab.collectives.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.collectives.types import DType, OpKind

Bytes = npt.NDArray[np.uint8]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return ``root_rank``'s object on every rank.

    Args:
        obj: Any object that cloudpickle accepts; only the root's matters.
        root_rank: The rank it comes from: a rank of the world, also within a process set.
        name: Equal on all ranks.
        process_set: Ranks that take part; all by default.

    Returns:
        At the root the very ``obj``, elsewhere a copy.

    Raises:
        InvalidRequestError: The process set is not registered, or has no such root. Nothing was sent.
        MismatchError, AbortedError: The ranks disagree, or one failed before it got here; the group can go on.
        NotInitializedError: ``init()`` was not called.

    After a failed call the root's object is unchanged, and no rank has a copy that it could use.
    """
    label = name or "broadcast_object"
    at_root = own_number("broadcast_object") == root_rank
    # Pickled before anything is sent: an object that can't be pickled must not leave the others waiting for long.
    payload = _to_bytes(obj) if at_root else np.empty(0, np.uint8)
    length = np.array([len(payload)], np.int64)
    _broadcast(length, DType.I64, f"{label}.size", root_rank, process_set)
    if not at_root:
        payload = np.empty(int(length[0]), np.uint8)
    _broadcast(payload, DType.U8, f"{label}.pickle", root_rank, process_set)
    return obj if at_root else cloudpickle.loads(payload.data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the list of all ranks' objects, in the order of the ranks, on every rank.

    Args:
        obj: Any object that cloudpickle accepts.
        name: Equal on all ranks.
        process_set: Ranks that take part; all by default.

    Raises:
        InvalidRequestError: The process set is not registered. Nothing was sent.
        MismatchError, AbortedError: The ranks disagree, or one failed before it got here; the group can go on.
        NotInitializedError: ``init()`` was not called.

    After a failed call the given objects are unchanged.
    """
    label = name or "allgather_object"
    payload = _to_bytes(obj)
    request = Request(
        OpKind.ALLGATHER, f"{label}.pickle", payload, dtype=DType.U8, process_set=set_id(process_set)
    )
    result = context.engine("allgather_object").run(request)
    assert result.output is not None
    gathered, ends = host_view(result.output), np.cumsum([rows for (rows,) in result.tables])
    return [
        cloudpickle.loads(gathered[end - rows : end].data)
        for (rows,), end in zip(result.tables, ends, strict=True)
    ]


def _broadcast(
    array: npt.NDArray[Any], dtype: DType, name: str, root_rank: int, process_set: ProcessSet
) -> None:
    operation = broadcasting(root_rank, set_id(process_set))
    request = Request(
        operation.kind,
        name,
        array,
        array,
        dtype,
        root=core_rank(operation.root, "broadcast_object"),
        process_set=operation.process_set,
    )
    context.engine("broadcast_object").run(request)


def _to_bytes(obj: Any) -> Bytes:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)

"""Workers of a store, and their collectives on its arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    HvdlabError,
    KVStoreError,
    MismatchError,
    UnsupportedError,
)
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.base import Key
from hvdlab.collectives.planes.base import dtype_of
from hvdlab.collectives.process_sets import GLOBAL_ID, ProcessSet, members, newest, position, set_id
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.types import PLAIN, SUM, DType, OpKind, ReduceOp

_TEXT_BYTES = 2048  # all workers broadcast as many, since they don't know the text's length


def joined() -> Engine:
    """Return this rank's engine; join the world if that has not happened yet."""
    return context.init()


class Workers:
    """Workers of a store, and their collectives: the ranks of the world, or of a process set.

    Args:
        process_set: The process set whose ranks are the workers; ``None`` for the world.

    Raises:
        KVStoreError: This rank is not in the process set.
        InvalidRequestError: The process set is not registered.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        engine = joined()
        #: Id of the process set of which the store was made.
        self._made_of = GLOBAL_ID if process_set is None else set_id(process_set)
        #: The ranks of that process set.
        self._all = () if process_set is None else members(self._made_of)
        if process_set is not None and engine.rank not in process_set.ranks:
            raise KVStoreError(
                f"rank {engine.rank} can't make a store of the process set of {format_ranks(process_set.ranks)}, in which it is "
                "not: let those ranks make it"
            )

    @property
    def id(self) -> int:
        """Return the id of their process set: of several with the same ranks the newest, which has again a rank that others have lost."""
        return GLOBAL_ID if self._made_of == GLOBAL_ID else newest(self._all, self._made_of)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return their ranks in the world, in ascending order."""
        return members(self.id)

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0. Raises ``KVStoreError`` if the process set has lost it."""
        # Not its rank: the world keeps the numbers of its ranks, and has a gap where one was lost.
        return position(self._own_id())

    @property
    def local_rank(self) -> int:
        """Return the number of this worker among those of its host, from 0. Raises ``KVStoreError`` if the process set has lost it."""
        return joined().local_rank if self.id == GLOBAL_ID else joined().local_rank_in(self._own_id())

    def _own_id(self) -> int:
        """Return the id of the process set, which has this worker."""
        id, rank = self.id, joined().rank
        if rank not in members(id):
            raise KVStoreError(
                f"rank {rank} was cut off, and the process set of {format_ranks(self._all)} has lost it: register one of the same ranks "
                "anew on all ranks (hvd.add_process_set), and the store goes on with that"
            )
        return id

    @property
    def count(self) -> int:
        """Return the number of workers."""
        return joined().size if self.id == GLOBAL_ID else len(self.ranks)

    def submit_sum(self, array: Array, name: str, *, at_once: bool = False) -> Handle:
        """Start the sum over all workers, in place. Several of one name may be in flight: they are matched in order.

        If the caller waits for it ``at_once``, that is quicker.
        """
        request = Request(
            OpKind.ALLREDUCE,
            name,
            array,
            array,
            _dtype(array),
            SUM,
            process_set=self.id,
            anonymous=True,
        )
        return context.engine("pushpull").submit(request, at_once=at_once)

    def submit_sum_in_parts(self, array: Array, name: str, priority: int) -> list[Handle]:
        """Start the sum over all workers, in place: of the tensors that are submitted so, the highest priority goes first.

        A large array is summed in parts, between which a more urgent one may go. They are a group, so workers that give arrays of
        different shapes fail alike.
        """
        dtype, flat = _dtype(array), array.reshape(-1)
        engine = context.engine("pushpull_async")
        count = max(1, math.ceil(array.nbytes / engine.settings.kv_partition_bytes))
        parts = [flat[len(flat) * n // count : len(flat) * (n + 1) // count] for n in range(count)]
        requests = [
            Request(
                OpKind.ALLREDUCE,
                f"{name}[{number}]" if number else name,
                part,
                part,
                dtype,
                SUM,
                process_set=self.id,
                # With the shape, which the flat parts do not have: workers that give different ones are in different groups, and fail
                # alike.
                group=(f"{name} {array.shape}", count) if count > 1 else None,
                anonymous=True,
                priority=priority,
            )
            # One that is not divided keeps its shape, by which the coordinator finds that workers disagree.
            for number, part in enumerate(parts if count > 1 else [array])
        ]
        return engine.submit_group(requests) if count > 1 else [engine.submit(requests[0])]

    def submit_broadcast(self, array: Array, name: str) -> Handle:
        """Start the broadcast from the first worker, in place."""
        request = Request(
            OpKind.BROADCAST,
            name,
            array,
            array,
            _dtype(array),
            root=self.ranks[0],
            process_set=self.id,
            anonymous=True,
        )
        return context.engine("broadcast").submit(request)

    def broadcast_text(self, text: str, name: str) -> str:
        """Return the first worker's text on all of them; a long one is cut. All workers call it together."""
        sent = np.zeros(_TEXT_BYTES, np.uint8)
        encoded = text.encode()[:_TEXT_BYTES]
        sent[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        self.submit_broadcast(sent, name).wait()
        # The text may have been cut in the middle of a character.
        return sent.tobytes().rstrip(b"\0").decode(errors="ignore")

    def submit_gather(self, array: Array, name: str) -> Handle:
        """Start to concatenate the rows of all workers; the result has the numbers of rows of each worker in its tables."""
        request = Request(
            OpKind.ALLGATHER, name, array, dtype=_dtype(array), process_set=self.id, anonymous=True
        )
        return context.engine("push").submit(request)

    def barrier(self, name: str) -> None:
        """Return once every worker has called it."""
        context.engine("barrier").run(Request(OpKind.BARRIER, name, process_set=self.id))

    def largest(self, own: Sequence[int], name: str) -> list[int]:
        """Return for each position in ``own`` the largest number of any worker. All workers call it together."""
        request = Request(
            OpKind.ALLREDUCE,
            name,
            dtype=DType.I64,
            reduction=PLAIN[ReduceOp.MAX],
            process_set=self.id,
            anonymous=True,
        )
        request.input = request.output = numbers = np.array(own, np.int64)
        context.engine("kvstore").run(request)
        found: list[int] = numbers.tolist()
        return found


def wait_for_handles(handles: list[tuple[Key, Handle]]) -> None:
    """Wait for all, then raise the first error, so that nothing is written to afterwards.

    Raises:
        KVStoreError: The ranks gave arrays of different shapes or types under one key. Where one of them is so large that it has
            parts, this also ends the others that are in flight, with an ``AbortedError``.
        AbortedError: A rank died, failed, left or was interrupted.
    """
    first: Exception | None = None
    for key, handle in handles:
        try:
            handle.wait()
        except HvdlabError as error:
            if first is None:
                first = _of_key(key, handle, error)
    if first is not None:
        raise first


def _of_key(key: Key, handle: Handle, error: HvdlabError) -> HvdlabError:
    """Return the error to raise for the failed sum of a key."""
    disagree = isinstance(error, MismatchError)
    if isinstance(error, AbortedError) and error.cause.kind is CauseKind.MISMATCH:
        # The whole generation ends when ranks disagree about a group. Only the sum that they disagree about gets this error.
        group = handle.request.group
        names = (handle.name,) if group is None else (handle.name, group[0])
        disagree = any(f"`{name}`" in error.cause.text for name in names)
    if not disagree:
        return error
    found = KVStoreError(f"the workers disagree about key {key!r}: {error}", key)
    found.__cause__ = error
    return found


def _dtype(array: Array) -> DType:
    dtype = dtype_of(array)
    if dtype is None:
        raise UnsupportedError(f"arrays of {array.dtype} can't be sent; convert to another type first.")
    return dtype

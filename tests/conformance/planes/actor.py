"""Actors that the cases drive: a plane directly, or (elsewhere) the whole negotiated engine."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.engine.operations import allreduce_adasum, allreduce_wide, reducescatter_wide
from hvdlab.collectives.planes.base import PhaseTimes, PlaneContext, storage_type
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.registry import PeerPlanes
from hvdlab.collectives.reduce import needs_width
from hvdlab.collectives.types import DType, ReduceOp, Reduction

Array = npt.NDArray[Any]


class CollectiveActor(ABC):
    """One member. All buffers are one-dimensional arrays in storage type; ``index`` is the member's position."""

    index: int
    size: int
    planned: bool
    """Whether the actor takes arbitrary ``counts`` in reducescatter; a negotiated one splits by Horovod's rule."""

    @abstractmethod
    def connect(self, timeout: float) -> None:
        """Join the other members."""

    @abstractmethod
    def allreduce(
        self,
        ins: Sequence[Array],
        dtype: DType,
        reduction: Reduction,
        in_place: bool,
    ) -> list[Array]:
        """Reduce a fused list; in place the returned arrays are the given ones."""

    @abstractmethod
    def allgather(self, send: Array, counts: Sequence[int], dtype: DType) -> Array: ...

    @abstractmethod
    def broadcast(self, buffer: Array, root: int, dtype: DType) -> None: ...

    @abstractmethod
    def reducescatter(
        self,
        send: Array,
        counts: Sequence[int],
        dtype: DType,
        reduction: Reduction,
    ) -> Array: ...

    @abstractmethod
    def alltoall(
        self, send: Array, send_counts: Sequence[int], recv_counts: Sequence[int], dtype: DType
    ) -> Array: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def message(self, buffer: Array, source: int, target: int, dtype: DType) -> None:
        """Send the buffer from one member to another, of which this is one; the received data is written to it."""

    @abstractmethod
    def abort(self) -> None:
        """End this member's wait. From any thread."""

    @property
    def gave_up(self) -> bool:
        """Whether an operation was aborted that the plane's library can't cancel, so that it keeps descriptors."""
        return False

    @abstractmethod
    def close(self) -> None: ...


def plane_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """Return an actor for the plane class ``module:Class``. The worker then calls :meth:`CollectiveActor.connect`."""
    module, _, cls = target.partition(":")
    plane_class: type[HostPlane] = getattr(importlib.import_module(module), cls)
    return PlaneActor(plane_class(context))


class PlaneActor(CollectiveActor):
    """Actor that drives a connected plane."""

    planned = True

    def __init__(self, plane: HostPlane) -> None:
        self.plane = plane
        self.index, self.size = plane.context.index, plane.context.size
        self.pairs = PeerPlanes(plane.name, plane.context, 30.0)

    def connect(self, timeout: float) -> None:
        self.plane.connect(timeout)

    def allreduce(
        self,
        ins: Sequence[Array],
        dtype: DType,
        reduction: Reduction,
        in_place: bool,
    ) -> list[Array]:
        outs = list(ins) if in_place else [np.empty_like(a) for a in ins]
        if reduction.op is ReduceOp.ADASUM:
            allreduce_adasum(self.plane, ins, outs, dtype, reduction, PhaseTimes())
        elif needs_width(dtype, reduction):
            allreduce_wide(self.plane, ins, outs, dtype, reduction, PhaseTimes())
        else:
            self.plane.allreduce(ins, outs, dtype, reduction.summed(self.size), PhaseTimes())
        return outs

    def allgather(self, send: Array, counts: Sequence[int], dtype: DType) -> Array:
        out = np.empty(sum(counts), storage_type(dtype))
        self.plane.allgather(send, counts, out, PhaseTimes())
        return out

    def broadcast(self, buffer: Array, root: int, dtype: DType) -> None:
        self.plane.broadcast(buffer, root, PhaseTimes())

    def reducescatter(
        self,
        send: Array,
        counts: Sequence[int],
        dtype: DType,
        reduction: Reduction,
    ) -> Array:
        out = np.empty(counts[self.index], storage_type(dtype))
        if needs_width(dtype, reduction):
            reducescatter_wide(self.plane, send, counts, out, dtype, reduction, PhaseTimes())
        else:
            self.plane.reducescatter(send, counts, out, dtype, reduction, PhaseTimes())
        return out

    def alltoall(
        self, send: Array, send_counts: Sequence[int], recv_counts: Sequence[int], dtype: DType
    ) -> Array:
        out = np.empty(sum(recv_counts), storage_type(dtype))
        self.plane.alltoall(send, send_counts, recv_counts, out, PhaseTimes())
        return out

    def barrier(self) -> None:
        self.plane.barrier(PhaseTimes())

    def message(self, buffer: Array, source: int, target: int, dtype: DType) -> None:
        if self.index == source:
            self.pairs.send(buffer, target, PhaseTimes())
        else:
            self.pairs.receive(buffer, source, PhaseTimes())

    def abort(self) -> None:
        self.plane.abort()
        self.pairs.abort()

    @property
    def gave_up(self) -> bool:
        return bool(getattr(self.plane, "gave_up", False)) or self.pairs.gave_up

    def close(self) -> None:
        self.plane.close()
        self.pairs.close()

"""From a framework's tensors to requests of the collective core: the one place where bindings submit anything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from hvdlab.bindings.adapter import DeviceMemory, FrameworkAdapter, HostMemory
from hvdlab.bindings.handles import Deliver, Finish, Handle, OutputAllocator, Part, delivered, every, only
from hvdlab.collectives import context
from hvdlab.collectives.context import core_rank
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.planes.base import HOST, HostArray
from hvdlab.collectives.reduce import needs_width
from hvdlab.collectives.types import SUM, DType, OpKind, ReduceOp, Reduction, check_supported

T = TypeVar("T")

_SHAPED_BY_RANKS = frozenset({OpKind.ALLGATHER, OpKind.REDUCESCATTER, OpKind.ALLTOALL})
"""Collectives whose output's shape depends on the other ranks, or on how many there are."""

_REDUCING = frozenset({OpKind.ALLREDUCE, OpKind.REDUCESCATTER})

_LABELS = {kind: kind.label for kind in OpKind}


class Operation(NamedTuple):
    """Parameters of a collective, apart from the tensors.

    Attributes:
        kind: Which collective.
        reduction: How an allreduce or a reducescatter reduces.
        root: Rank a broadcast comes from, as scripts number them.
        process_set: Id of the process set.
        splits: Rows for each rank of an alltoall.
    """

    kind: OpKind
    reduction: Reduction = SUM
    root: int = -1
    process_set: int = 0
    splits: tuple[int, ...] | None = None


def reduced_at_once(
    source: HostArray, out: HostArray, name: str | None, op: ReduceOp, process_set: int
) -> bool:
    """Reduce an array by the shortest way, as :meth:`Engine.allreduce` does. Return false if the caller has to run an operation."""
    return context.engine("allreduce").allreduce(source, out, name, op, process_set)


class Binding(Generic[T]):
    """Binding of one framework: runs collectives on its tensors.

    Args:
        adapter: Reads and makes the framework's tensors.
        devices: The same for tensors on devices; with ``None`` these are staged through the host.
    """

    def __init__(self, adapter: FrameworkAdapter[T], devices: DeviceMemory[T] | None = None) -> None:
        self.adapter = adapter
        self._host = HostMemory(adapter)
        self._devices = devices

    def submit(
        self,
        operation: Operation,
        tensor: Any,
        name: str | None,
        *,
        in_place: bool = False,
        announce: bool = True,
        site: str | None = None,
    ) -> Handle:
        """Start a collective on one tensor; ``in_place`` writes the result to it.

        Without ``announce`` the caller must have the collective announced later; see ``Engine.submit``. ``site`` is the
        user's line, where the stack does not lead to it.

        The handle yields the output (in place: the very ``tensor``), or for an alltoall the output and the received
        splits.
        """
        request, output, deliver = self._request(operation, tensor, in_place)
        request.name, request.site = name, site
        core = context.engine(_LABELS[operation.kind]).submit(request, announce=announce)
        part = Part(core, output, deliver)
        return Handle((part,), self._with_splits if operation.kind is OpKind.ALLTOALL else only)

    def run(
        self, operation: Operation, tensor: Any, name: str | None, *, in_place: bool = False
    ) -> tuple[T, Result]:
        """Run a collective on one tensor and wait: cheaper than a handle, as no other thread has to wake this one.

        Returns:
            The output, and the core's result.
        """
        request, output, deliver = self._request(operation, tensor, in_place)
        request.name = name
        result = context.engine(_LABELS[operation.kind]).run(request)
        return delivered(output, deliver), result

    def submit_group(
        self,
        operation: Operation,
        tensors: Sequence[Any],
        name: str | None,
        *,
        in_place: bool = False,
        finish: Finish[T] = every,
        announce: bool = True,
        site: str | None = None,
    ) -> Handle:
        """Start a collective on tensors that are executed together; the handle yields the list of outputs.

        All arguments are checked before the first tensor is sent, so that an error here leaves no half a group behind.
        """
        label = _LABELS[operation.kind]
        engine = context.engine(f"grouped_{label}")
        base = name or f"grouped_{label}.noname"
        with nullcontext() if self._devices is None else self._devices.views_together():
            prepared = [self._request(operation, tensor, in_place) for tensor in tensors]
        for number, (request, _, _) in enumerate(prepared):
            request.name, request.site = f"{base}.{number}", site
            request.anonymous = name is None
            request.group = (base, len(prepared))
        handles = engine.submit_group([request for request, _, _ in prepared], announce=announce)
        parts = [
            Part(handle, output, deliver)
            for handle, (_, output, deliver) in zip(handles, prepared, strict=True)
        ]
        return Handle(parts, finish)

    def _request(
        self, operation: Operation, given: Any, in_place: bool
    ) -> tuple[Request, T | OutputAllocator[T], Deliver[T] | None]:
        """Return a request without a name, the tensor or allocator of its output, and how the output gets to the user."""
        adapter, kind = self.adapter, operation.kind
        tensor = adapter.check(given, kind, in_place)
        dtype = adapter.dtype(tensor)
        check_supported(kind, dtype, operation.reduction.op)
        memory: HostMemory[T] | DeviceMemory[T] = self._host
        direct, device = memory.is_direct(tensor), HOST
        # Only then: a tensor of the host, which is direct in most programs, need not be asked for its device.
        if not direct and self._devices is not None:
            device = self._device(self._devices, operation, tensor, dtype)
            if device != HOST:
                memory = self._devices
                direct = memory.is_direct(tensor)
        source = tensor if direct else memory.stage(tensor)
        root = core_rank(operation.root, "broadcast") if kind is OpKind.BROADCAST else -1
        # By position: by name it took as long again.
        request = Request(
            kind, None, None, None, dtype, operation.reduction, root, operation.splits, operation.process_set,
        )  # fmt: skip
        request.device = device
        output: T | OutputAllocator[T]
        if kind in _SHAPED_BY_RANKS:
            request.input = memory.view(source)
            request.allocate = output = OutputAllocator(memory, source)
        # A staged copy is this collective's own, so that the result can overwrite it.
        elif in_place or not direct:
            request.input = request.output = memory.view(source)
            output = source
        elif kind is OpKind.BROADCAST:
            output = self._broadcast_buffer(memory, source, request.root)
            request.input = request.output = memory.view(output)
        else:
            output = memory.empty_like(source)
            request.input, request.output = memory.view(source), memory.view(output)
        if not in_place:
            return request, output, self._placing(direct, device, tensor)
        if direct:
            adapter.mark_written(tensor)
            return request, given, None
        return request, output, partial(self._written_back, into=tensor, given=given)

    def _device(self, devices: DeviceMemory[T], operation: Operation, tensor: T, dtype: DType) -> str:
        """Return the device class on which a collective of this tensor works: its own if a plane can do it, otherwise the host's."""
        device = devices.device(tensor)
        # Adasum is numpy's arithmetic on the host's memory, and so are the wide reductions below.
        if device == HOST or operation.reduction.op is ReduceOp.ADASUM:
            return HOST
        engine = context.engine(_LABELS[operation.kind])
        if not engine.device_plane(operation.process_set, device):
            return HOST
        reduces = operation.kind in _REDUCING
        wide = reduces and needs_width(dtype, operation.reduction)
        return HOST if wide else device

    def _placing(self, direct: bool, device: str, tensor: T) -> Deliver[T] | None:
        """Return the function that moves an output to its place for the user; ``None`` if it is in place already."""
        if device != HOST:
            assert self._devices is not None
            return self._devices.received
        return None if direct else partial(self.adapter.placed, like=tensor)

    def _broadcast_buffer(self, memory: HostMemory[T] | DeviceMemory[T], tensor: T, root: int) -> T:
        """Return the tensor that a broadcast works on if it must not change its argument: read at the root, written elsewhere."""
        if context.engine("broadcast").rank == root:
            return memory.stage(tensor)
        return memory.empty_like(tensor)

    def _written_back(self, output: T, into: T, given: Any) -> Any:
        self.adapter.deliver(output, into)
        return given

    def _with_splits(self, outputs: list[T], parts: Sequence[Part[T]]) -> tuple[T, Any]:
        """Finish an alltoall: the output, and how many of its rows came from each member."""
        return outputs[0], self.received_splits(parts[0].result)

    def received_splits(self, result: Result) -> Any:
        """Return the second result of an alltoall: one number for each member."""
        return self.adapter.received_splits(result.received_splits or ())

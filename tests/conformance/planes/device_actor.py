"""The engine with tensors on a fake device, whose plane ends operations later; see ``support/fakes/device.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from conformance.planes.actor import Array, CollectiveActor
from conformance.planes.engine_actor import EngineActor
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.planes.base import PlaneContext
from hvdlab.collectives.reduce import needs_width
from hvdlab.collectives.types import OpKind, ReduceOp
from support.fakes import device as fake_device


def device_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """Return an engine beside whose plane for the host there is one for the device."""
    fake_device.register()
    return DeviceActor("shm", context)


class DeviceActor(EngineActor):
    """Actor that puts its arguments on the device, and copies the results back."""

    def connect(self, timeout: float) -> None:
        super().connect(timeout)
        assert self._engine is not None
        assert self._engine.device_plane(0, fake_device.DEVICE) == fake_device.PLANE

    @contextmanager
    def _aborting(self) -> Iterator[Engine]:
        with super()._aborting() as engine:
            yield OnDevice(engine)  # type: ignore[misc]  # the part of an engine that the actor uses


class OnDevice:
    """Engine for whose callers all tensors seem to be on the host."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, request: Request, timeout: float | None = None) -> Result:
        return self._back(request, self._engine.run(self._moved(request), timeout))

    def submit_group(self, requests: list[Request]) -> list[Any]:
        handles = self._engine.submit_group([self._moved(request) for request in requests])
        return [Copying(self, *pair) for pair in zip(requests, handles, strict=True)]

    def _moved(self, request: Request) -> Request:
        if request.kind is OpKind.BARRIER or _for_the_host(request):
            return request
        array: Array = request.input  # type: ignore[assignment]  # the actor gives arrays
        moved = fake_device.on_device(array, request.dtype)
        in_place = request.output is request.input
        return replace(request, input=moved, output=moved if in_place else None, device=fake_device.DEVICE)

    def _back(self, request: Request, result: Result) -> Result:
        if result.output is None or _for_the_host(request):
            return result
        memory = fake_device.memory_of(result.output)
        if request.output is not None:
            request.output[...] = memory  # type: ignore[index]  # the actor gives arrays
            memory = request.output  # type: ignore[assignment]
        return replace(result, output=memory)


def _for_the_host(request: Request) -> bool:
    """Whether only the host does this: a binding stages tensors that are elsewhere."""
    if request.kind is OpKind.SENDRECV or request.reduction.op is ReduceOp.ADASUM:
        return True
    return needs_width(request.dtype, request.reduction)


class Copying:
    """Handle whose result is copied back."""

    def __init__(self, engine: OnDevice, request: Request, handle: Handle) -> None:
        self._engine, self._request, self._handle = engine, request, handle

    def wait(self) -> Result:
        return self._engine._back(self._request, self._handle.wait())

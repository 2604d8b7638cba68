"""The whole engine as the actor of the cases: every operation is negotiated by a coordinator, then executed.

Two things are no part of an engine's interface: reducescatter splits by Horovod's rule only (``ragged``), and after an
abort the next operation works, in a new generation, instead of being refused (``abort``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from conformance.planes.actor import Array, CollectiveActor
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.errors import AbortedError, InvalidRequestError
from hvdlab.collectives.planes.base import PlaneAborted, PlaneContext
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import HOST_VARIABLE
from hvdlab.collectives.types import DType, OpKind, Reduction

SITE = "conformance"


class Coordination:
    """Coordinator of a group, and a client that announces its world's ranks once they change."""

    def __init__(self, size: int) -> None:
        self._coordinator = CoordinatorProcess.start(size=size)
        self._client: Client | None = None
        self._members = list(range(size))
        self.environment: Mapping[str, str] = {
            "HVDLAB_COORDINATOR": self._coordinator.address,
            "HVDLAB_TOKEN": self._coordinator.token,
        }

    def expect(self, members: Sequence[int]) -> None:
        if list(members) == self._members:
            return
        self._members = list(members)
        if self._client is None:
            self._client = Client.connect(self._coordinator.address, self._coordinator.client_token)
        self._client.expect(members)
        self._client.flush()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._coordinator.close()


def engine_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """Return an engine that is made to use the plane class ``module:Class``."""
    module, _, cls = target.partition(":")
    plane: type[HostPlane] = getattr(importlib.import_module(module), cls)
    return EngineActor(plane.name, context)


class EngineActor(CollectiveActor):
    """Actor that drives an engine. Its rank is the worker's number; ``index`` is its position among those that live."""

    planned = False

    def __init__(self, plane: str, context: PlaneContext) -> None:
        self.index, self.size = context.index, context.size
        self._plane = plane
        self._ranks = context.ranks
        self._host = context.hosts[context.index]
        self._engine: Engine | None = None
        self._groups = 0

    def connect(self, timeout: float) -> None:
        os.environ[HOST_VARIABLE] = self._host
        settings = replace(Settings.from_env(), rank=self._ranks[self.index], plane=self._plane)
        self._engine = Engine.connect(settings, timeout=timeout)
        self._engine.wait_for_world(timeout)
        assert self._engine.ranks() == self._ranks
        assert self._engine.plane() == self._plane
        self.barrier()  # the plane is built at the first use, which imports torch or MPI

    def allreduce(
        self,
        ins: Sequence[Array],
        dtype: DType,
        reduction: Reduction,
        in_place: bool,
    ) -> list[Array]:
        self._groups += 1
        group = (f"group {self._groups}", len(ins)) if len(ins) > 1 else None
        requests = [
            Request(
                OpKind.ALLREDUCE,
                input=array,
                output=array if in_place else None,
                dtype=dtype,
                reduction=reduction,
                group=group,
                site=SITE,
            )
            for array in ins
        ]
        with self._aborting() as engine:
            if group is None:
                return [_output(engine.run(requests[0]))]
            return [_output(handle.wait()) for handle in engine.submit_group(requests)]

    def allgather(self, send: Array, counts: Sequence[int], dtype: DType) -> Array:
        result = self._run(Request(OpKind.ALLGATHER, input=send, dtype=dtype, site=SITE))
        assert result.tables == tuple((count,) for count in counts)
        return _output(result)

    def broadcast(self, buffer: Array, root: int, dtype: DType) -> None:
        self._run(
            Request(
                OpKind.BROADCAST, input=buffer, output=buffer, dtype=dtype, root=self._ranks[root], site=SITE
            )
        )

    def reducescatter(
        self,
        send: Array,
        counts: Sequence[int],
        dtype: DType,
        reduction: Reduction,
    ) -> Array:
        return _output(
            self._run(
                Request(
                    OpKind.REDUCESCATTER,
                    input=send,
                    dtype=dtype,
                    reduction=reduction,
                    site=SITE,
                )
            )
        )

    def alltoall(
        self, send: Array, send_counts: Sequence[int], recv_counts: Sequence[int], dtype: DType
    ) -> Array:
        splits = tuple(send_counts)
        result = self._run(Request(OpKind.ALLTOALL, input=send, dtype=dtype, splits=splits, site=SITE))
        assert result.received_splits == tuple(recv_counts)
        return _output(result)

    def barrier(self) -> None:
        self._run(Request(OpKind.BARRIER, site=SITE))

    def message(self, buffer: Array, source: int, target: int, dtype: DType) -> None:
        ranks = (self._ranks[source], self._ranks[target])
        output = buffer if self.index == target else None
        self._run(
            Request(
                OpKind.SENDRECV,
                input=buffer,
                output=output,
                dtype=dtype,
                root=ranks[0],
                ranks=ranks,
                name=f"{source}>{target}",
                site=SITE,
            )
        )

    def abort(self) -> None:
        if self._engine is not None:
            self._engine.withdraw("the case gives up")

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _run(self, request: Request) -> Result:
        with self._aborting() as engine:
            return engine.run(request)

    @contextmanager
    def _aborting(self) -> Iterator[Engine]:
        """Raise the cases' own exception for errors that end an operation early."""
        assert self._engine is not None
        try:
            yield self._engine
        except AbortedError as error:
            raise PlaneAborted(str(error)) from error
        except InvalidRequestError as error:
            if self._engine.ranks() == self._ranks:
                raise
            # A member that had nothing in flight when another one died goes on in a world that this request does not fit.
            raise PlaneAborted(str(error)) from error


def _output(result: Result) -> Array:
    assert isinstance(result.output, np.ndarray)
    return result.output

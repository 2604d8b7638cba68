"""Spans of pushes and pulls: from the call on the worker, over the work on the server, to the answer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.kvstore.base import Key
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.planes.base import PhaseTimes, dtype_of
from hvdlab.collectives.text import call_site
from hvdlab.collectives.tracing.record_format import ClockSamples, group_of, push_batch
from hvdlab.collectives.types import DType, OpKind


class StoreSpans:
    """Recorder of one store's requests on this worker.

    Args:
        engine: This rank's engine.
        store: The store's number, equal on all workers.
        servers: How many servers it has.
    """

    def __init__(self, engine: Engine, store: int, servers: int) -> None:
        self._engine = engine
        self._elements: dict[np.dtype[Any], DType] = {}
        self._groups = {
            (server, kind): group_of(store, server, kind)
            for server in range(servers)
            for kind in (OpKind.PUSH, OpKind.PULL)
        }
        for group in self._groups.values():
            engine.introduce_group(group)

    def begin(self, kind: OpKind, key: Key, server: int, dtype: np.dtype[Any], nbytes: int) -> RequestSpan:
        """Start the span of a request now. The user's line is that of the caller's caller.

        Args:
            kind: ``PUSH`` or ``PULL``.
            key: The key of the value.
            server: Number of the server.
            dtype: Element type of the array that travels.
            nbytes: Size of that array in bytes.
        """
        element = self._elements.get(dtype)
        if element is None:
            # Stores have types of elements that the core lacks, such as uint16: records show these as bytes.
            element = self._elements[dtype] = dtype_of(np.empty(0, dtype)) or DType.U8
        return RequestSpan(self, kind, str(key), server, element, nbytes)

    def end(
        self, span: RequestSpan, answer: m.RequestDone | m.RequestFailed, began: int, finished: int
    ) -> None:
        """Record a request that was answered; ``began`` (ns, 0 if it failed) is when the server began with it."""
        version = batch = took = 0
        if isinstance(answer, m.RequestDone):
            version, took = answer.version, finished - began
            if span.kind is OpKind.PULL:
                batch = answer.sequence << 12 | self._engine.rank  # no other rank's
                took = min(took, answer.took)
            else:
                batch = push_batch(answer.staleness)
        self._engine.record_request(
            span.name,
            span.site,
            span.kind,
            span.dtype,
            self._groups[span.server, span.kind],
            version,
            batch,
            span.nbytes,
            (span.called, began, finished),
            PhaseTimes(transfer=took),
            isinstance(answer, m.RequestDone),
        )


class RequestSpan:
    """Span of a push or a pull that is under way.

    Attributes:
        called, sent: When the worker began the request, and when it sent it, in ns.
    """

    __slots__ = ("_log", "called", "dtype", "kind", "name", "nbytes", "sent", "server", "site")

    def __init__(
        self, log: StoreSpans, kind: OpKind, name: str, server: int, dtype: DType, nbytes: int
    ) -> None:
        self._log, self.kind, self.name, self.server = log, kind, name, server
        self.dtype, self.nbytes = dtype, nbytes
        self.site = call_site(2)
        self.called = self.sent = time.monotonic_ns()

    def answered(self, answer: m.RequestDone | m.RequestFailed, clock: ServerClock) -> None:
        """Record that the answer has come, now."""
        seen = time.monotonic_ns()
        if isinstance(answer, m.RequestFailed):
            self._log.end(self, answer, 0, seen)
            return
        # The clock of a server on another host is known to half a round trip only, and the recorder refuses times that are out of
        # order.
        began = min(max(clock.here(answer, self.sent, seen), self.called), seen)
        # A push is complete when the server has applied it, even if its worker reads the answer much later.
        finished = seen if self.kind is OpKind.PULL else min(began + answer.took, seen)
        self._log.end(self, answer, began, finished)


class ServerClock:
    """Clock of a server, which is this worker's if both are on one host.

    Args:
        local: Both are.
    """

    def __init__(self, *, local: bool) -> None:
        self._local = local
        self._samples = ClockSamples()

    def here(self, answer: m.RequestDone, sent: int, seen: int) -> int:
        """Return when the server began with a request, on this worker's clock, in ns.

        Args:
            answer: The server's answer.
            sent, seen: When this worker sent the request and when it saw the answer, in ns.
        """
        if self._local:
            return answer.began
        self._samples.add(sent, seen, answer.began + answer.took)
        best = self._samples.best(seen)
        assert best is not None
        asked, came, there = best
        return answer.began - there + (asked + came) // 2

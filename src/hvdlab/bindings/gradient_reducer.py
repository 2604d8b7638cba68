"""Reduction of gradients while the backward pass still runs.

A *bucket* is one parameter, or a group of them that is reduced together. Once the gradients of all its
parameters have been accumulated often enough, its allreduce is due. :meth:`GradientReducer.synchronize` starts the rest, also those
that this rank's backward pass did not reach (another rank's may have), and waits for all.

Allreduces that are due are submitted and announced several together. Each announcement costs this rank and the coordinator a message,
and the order that answers it interrupts the backward pass. To submit a gradient costs several times as much right after the layer
that made it, whose data fill the processor's caches, as together with others. So gradients take turns: when there is enough to move,
when the first of them has waited for some milliseconds, and when the backward pass ends or a thread waits for them.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.bindings.arguments import Average
from hvdlab.bindings.compression import Compressor, NoneCompressor
from hvdlab.bindings.gradient_hooks import BackwardPassCounter, HookInstaller, P, P_contra
from hvdlab.bindings.handles import FAILURES, Handle, synchronize
from hvdlab.bindings.operations import Binding, Operation
from hvdlab.collectives import context
from hvdlab.collectives.errors import CollectiveError, DuplicateNameError
from hvdlab.collectives.process_sets import ProcessSet, set_id
from hvdlab.collectives.text import call_site
from hvdlab.collectives.types import OpKind, ReduceOp

ENOUGH_BYTES = 4 << 20
"""Gradients of this size are worth moving while the backward pass goes on: they take milliseconds, a turn takes some tenths of one."""
LONGEST_SECONDS = 0.01
"""After so many seconds the next gradient has those before announced with it, however small they are."""


class BackwardPass(Protocol):
    """Backward pass that runs on this thread, as its framework knows it."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the backward pass ends, unless it fails.

        A callback may give another one, which is called after all that were given before. Does nothing outside of a backward pass, or if
        the framework does not report when one ends.
        """


class Announcer:
    """Scheduler of the submission and announcement of gradients that are held. For one thread at a time.

    Args:
        backward: Has the rest announced at the end of the backward pass.
        submit: Submits the held gradients. A method, whose object may own the announcer: it is referred to weakly.
    """

    def __init__(self, backward: BackwardPass, submit: Callable[[], None]) -> None:
        self._backward = backward
        self._submit = weakref.WeakMethod(submit)
        #: Held bytes, since when (``time.monotonic()``), and whether any are held.
        self._bytes = 0
        self._since = 0.0
        self._waiting = False

    def hold(self, nbytes: int) -> None:
        """Count ``nbytes`` more held bytes, and announce them now, or by the end of the backward pass.

        Outside a backward pass the thread that waits for them announces them.
        """
        now = time.monotonic()
        if not self._waiting:
            self._waiting, self._bytes, self._since = True, 0, now
            here: weakref.ref[Announcer] = weakref.ref(self)
            self._backward.at_end(lambda: _announce_rest(here))
        self._bytes += nbytes
        if self._bytes >= ENOUGH_BYTES or now - self._since >= LONGEST_SECONDS:
            self.announce()

    def announce(self) -> None:
        """Submit and announce the held gradients, if any."""
        if self._waiting:
            self._submit_held()
            context.engine().flush()

    def end(self) -> None:
        """Submit the rest at the end of the backward pass, and announce it once all announcers of that pass have submitted theirs.

        Two of them may have used one name. That is found on every rank alike if nothing is executed in between.
        """
        if self._waiting:
            self._submit_held()
            self._backward.at_end(_flush)

    def _submit_held(self) -> None:
        # First: if a bucket is refused, hold() must begin afresh in the next backward pass.
        self._waiting = False
        submit = self._submit()
        if submit is not None:
            submit()

    def forget(self) -> None:
        """Forget the held gradients: their reduction has ended."""
        self._waiting = False


def _announce_rest(announcer: weakref.ref[Announcer]) -> None:
    found = announcer()
    if found is not None and context.is_initialized():
        found.end()


def _flush() -> None:
    if context.is_initialized():
        context.engine().flush()


T = TypeVar("T")


@dataclass(frozen=True)
class ReductionSettings:
    """Settings of the reduction of gradients.

    Attributes:
        compression: The compressor that they are sent through.
        op: ``Average`` or ``Sum``; ``Adasum`` is not for gradients, but for the changes that an optimizer makes with them.
        predivide: Divisor before the sum, as part of the division of an average.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
        process_set: The ranks that reduce them together.
    """

    compression: type[Compressor]
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def operation(self) -> Operation:
        """Return the allreduce of a bucket; for an average the division is split around the sum."""
        before, after = (1.0 / self.predivide, self.predivide) if self.op is Average else (1.0, 1.0)
        return Operation(OpKind.ALLREDUCE, self.op, before, after, process_set=set_id(self.process_set))


class GradientAdapter(HookInstaller[P_contra], BackwardPass, Protocol[P_contra, T]):
    """Access to a framework's parameters and their gradients. One object for each reducer, so it can keep state.

    All functions are called on the thread of the backward pass, or of ``synchronize``.

    Attributes:
        names_twice: The meaning, and the user's remedy in this framework, if two optimizers reduce gradients of the
            same name at once, as sentences.
    """

    @property
    def names_twice(self) -> str: ...

    def untracked(self) -> AbstractContextManager[object]:
        """Return a context within which no operation is recorded for differentiation."""
        ...

    def gradient(self, parameter: P_contra) -> T:
        """Return this rank's contribution for a parameter: its gradient, or zeros if it has none.

        Raises:
            AssertionError: The gradient can't be written to.
        """
        ...

    def is_sparse(self, gradient: T) -> bool:
        """Return whether it is reduced by :meth:`reduce_sparse`."""
        ...

    def reduce_sparse(self, gradient: T, name: str, settings: ReductionSettings) -> Handle:
        """Start the reduction of a sparse gradient; the handle yields the result."""
        ...

    def as_sent(self, parameters: Sequence[P_contra], tensors: Sequence[T]) -> Sequence[T]:
        """Return views of tensors that the core can work on without copies, if they lie in memory as their parameters do."""
        ...

    def nbytes(self, tensors: Sequence[T]) -> int:
        """Return the size of these together, in bytes."""
        ...

    def install(self, parameter: P_contra, reduced: T) -> None:
        """Leave the result in the parameter's gradient. Called within :meth:`untracked`."""


@dataclass(slots=True)
class _InFlight(Generic[P, T]):
    """An allreduce of a bucket's gradients.

    Attributes:
        handle: Its handle.
        parameters: The parameters that the gradients belong to.
        contexts: For each of them, the context that decompresses it.
        outputs: Where the results are, if the handle does not yield them.
    """

    handle: Handle
    parameters: Sequence[P]
    contexts: Sequence[Any]
    outputs: Sequence[T] | None = None


class _Bucket(Generic[P, T]):
    """Parameters whose gradients are reduced together.

    Attributes:
        name: Tensor name in the core.
        parameters: Its parameters.
        nbytes: The size of its dense gradients in bytes, or -1 if it is not known yet.
        ready: How many of them have been accumulated often enough.
        work: The handles in flight: one allreduce of all dense gradients, one for each sparse one; ``None`` if it has not
            been started.
    """

    __slots__ = ("name", "nbytes", "parameters", "ready", "work")

    def __init__(self, name: str, parameters: Iterable[P]) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.nbytes = -1
        self.ready = 0
        self.work: list[_InFlight[P, T]] | None = None


class GradientReducer(BackwardPassCounter[P], Generic[P, T]):
    """Reducer that starts allreduces from hooks of the backward pass, and collects them.

    Args:
        binding: Runs collectives on the framework's tensors.
        adapter: How its parameters hold their gradients.
        settings: How gradients are reduced.
        passes: After how many backward passes.
    """

    def __init__(
        self, binding: Binding[T], adapter: GradientAdapter[P, T], settings: ReductionSettings, passes: int
    ) -> None:
        super().__init__(adapter, passes)
        self._binding, self._adapter, self._settings = binding, adapter, settings
        #: All buckets in the order of :meth:`watch`, and the bucket of each parameter.
        self._buckets: list[_Bucket[P, T]] = []
        self._bucket_of: dict[P, _Bucket[P, T]] = {}
        #: Buckets whose allreduce is due in the next turn.
        self._held: list[_Bucket[P, T]] = []
        self._announcer = Announcer(adapter, self._start_held)
        #: The allreduce of this step's buckets. Made again for each step: the process set's id can be another by then.
        self._operation: Operation | None = None

    def watch(self, name: str, parameters: Iterable[P]) -> None:
        bucket: _Bucket[P, T] = _Bucket(name, parameters)
        super().watch(name, bucket.parameters)
        self._buckets.append(bucket)
        self._bucket_of.update(dict.fromkeys(bucket.parameters, bucket))

    def complete(self, parameter: P) -> None:
        bucket = self._bucket_of[parameter]
        bucket.ready += 1
        if bucket.ready == len(bucket.parameters):
            if bucket.nbytes < 0:
                bucket.nbytes = self._dense_bytes(bucket)
            self._held.append(bucket)
            self._announcer.hold(bucket.nbytes)

    def synchronize(self) -> None:
        """Reduce the gradients that are still missing, wait for all, and leave the results in the parameters' gradients.

        Parameters without a gradient take part with zeros, since another rank may have one. After an error, the
        gradients are undefined and the next backward pass starts afresh.

        Raises:
            CollectiveError, DuplicateNameError: The first failure; then no gradient is written to any more.
            InvalidRequestError: Another watcher has taken over.
        """
        self.check()
        if self._unfinished:
            self.drop()
        self._unfinished = True
        self._start_all(self._buckets)
        try:
            self._collect()
        except FAILURES:
            self.reset()
            raise
        self.reset()
        self.settled = True

    def drop(self) -> None:
        try:
            if self._held and self._failed_cells == context.engine().failed_cells:
                # Another rank may have started them in an earlier turn, and waits for this one's.
                with contextlib.suppress(*FAILURES):
                    self._start_held()
            for bucket in self._buckets:
                for work in bucket.work or ():
                    with contextlib.suppress(*FAILURES):
                        synchronize(work.handle)
        finally:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self._announcer.forget()
        self._held.clear()
        self._operation = None
        for bucket in self._buckets:
            bucket.ready, bucket.work = 0, None

    # -- a bucket -----------------------------------------------------------------------------------------------------

    def _dense_bytes(self, bucket: _Bucket[P, T]) -> int:
        adapter = self._adapter
        gradients = [adapter.gradient(parameter) for parameter in bucket.parameters]
        return adapter.nbytes([gradient for gradient in gradients if not adapter.is_sparse(gradient)])

    def _start_held(self) -> None:
        """Start the allreduces that are due. If one is refused, :meth:`synchronize` starts those behind it."""
        held, self._held = self._held, []
        self._start_all(held)

    def _start_all(self, buckets: Sequence[_Bucket[P, T]]) -> None:
        """Start those of these buckets that have not been started, all from one line of the user's."""
        site: str | None = None
        for bucket in buckets:
            if bucket.work is None:
                site = site or call_site()
                self._start(bucket, site)

    def _start(self, bucket: _Bucket[P, T], site: str) -> None:
        try:
            self._submit(bucket, site)
        except DuplicateNameError as error:
            raise DuplicateNameError(
                error.name, error.first_site, error.second_site, self._adapter.names_twice
            ) from None

    def _submit(self, bucket: _Bucket[P, T], site: str) -> None:
        adapter, parameters = self._adapter, bucket.parameters
        gradients = [adapter.gradient(parameter) for parameter in parameters]
        if not any(map(adapter.is_sparse, gradients)):
            bucket.work = [self._start_dense(bucket.name, parameters, gradients, site)]
            return
        pairs = list(zip(parameters, gradients, strict=True))
        dense = [(parameter, gradient) for parameter, gradient in pairs if not adapter.is_sparse(gradient)]
        started: list[_InFlight[P, T]] = []
        if dense:
            some, theirs = zip(*dense, strict=True)
            started.append(self._start_dense(bucket.name, some, theirs, site))
        # Before the sparse ones: if one of them is refused, drop() still waits for those that were started.
        bucket.work = started
        for number, (parameter, gradient) in enumerate(pairs):
            if adapter.is_sparse(gradient):
                handle = adapter.reduce_sparse(gradient, f"{bucket.name}.sparse{number}", self._settings)
                started.append(_InFlight(handle, [parameter], [None]))

    def _start_dense(
        self, name: str, parameters: Sequence[P], gradients: Sequence[T], site: str
    ) -> _InFlight[P, T]:
        adapter, operation = self._adapter, self._operation
        if operation is None:
            operation = self._operation = self._settings.operation()
        sent: Sequence[T] = gradients
        contexts: Sequence[Any] = (None,) * len(gradients)
        if self._settings.compression is not NoneCompressor:
            with adapter.untracked():
                pairs = [self._settings.compression.compress(gradient) for gradient in gradients]
            sent, contexts = [tensor for tensor, _ in pairs], [needed for _, needed in pairs]
        views = adapter.as_sent(parameters, sent)
        if len(views) == 1:
            handle = self._binding.submit(operation, views[0], name, in_place=True, announce=False, site=site)
        else:
            handle = self._binding.submit_group(
                operation, views, name, in_place=True, announce=False, site=site
            )
        return _InFlight(handle, parameters, contexts, sent)

    def _collect(self) -> None:
        """Wait for every bucket, also after one has failed: no gradient may be written to after this."""
        failure: CollectiveError | DuplicateNameError | None = None
        # Around all of it, and not for each bucket: with some frameworks to enter it costs as much time as all other work here.
        with self._adapter.untracked():
            for work in (work for bucket in self._buckets for work in bucket.work or ()):
                try:
                    result = synchronize(work.handle)
                except FAILURES as error:
                    failure = failure or error
                    continue
                self._install(work, [result] if work.outputs is None else work.outputs)
        if failure is not None:
            raise failure

    def _install(self, work: _InFlight[P, T], outputs: Sequence[T]) -> None:
        for parameter, output, needed in zip(work.parameters, outputs, work.contexts, strict=True):
            self._adapter.install(parameter, self._settings.compression.decompress(output, needed))

"""Reduction of gradients while the backward pass still runs.

A *bucket* is one parameter, or a group of them that is reduced together. Once the gradients of all its
parameters have been accumulated often enough, its allreduce is due. :meth:`GradientReducer.synchronize` starts the rest, also those
that this rank's backward pass did not reach (another rank's may have), and waits for all.

Allreduces that are due are submitted and announced several together. Each announcement costs this rank and the coordinator a message,
and the order that answers it interrupts the backward pass. To submit a gradient costs several times as much right after the layer
that made it, whose data fill the processor's caches, as together with others. So gradients take turns: when there is enough to move,
when the first of them has waited for some milliseconds, and when the backward pass ends or a thread waits for them.

A framework brings a :class:`HookInstaller`, which registers hooks on gradients. :class:`BackwardPassCounter` counts the backward passes of
a training step by them. :func:`bucketed` decides which parameters' gradients are reduced together, and under which names.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.bindings.arguments import Average
from hvdlab.bindings.compression import Compressor, NoneCompressor
from hvdlab.bindings.handles import FAILURES, Handle, synchronize
from hvdlab.bindings.operations import Binding, Operation
from hvdlab.collectives import context
from hvdlab.collectives.errors import CollectiveError, DuplicateNameError, InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, set_id
from hvdlab.collectives.text import call_site
from hvdlab.collectives.types import PLAIN, OpKind, ReduceOp, Reduction

P = TypeVar("P", bound=Hashable)
"""A framework's parameter, or what stands for it if parameters can't be keys of a dictionary; equal only to itself."""
P_contra = TypeVar("P_contra", contravariant=True)
K = TypeVar("K")
T = TypeVar("T")

ENOUGH_BYTES = 4 << 20
"""Gradients of this size are worth moving while the backward pass goes on: they take milliseconds, a turn takes some tenths of one."""
LONGEST_SECONDS = 0.01
"""After so many seconds the next gradient has those before announced with it, however small they are."""


class RemovableHook(Protocol):
    """Registered hook, which can be removed."""

    def remove(self) -> None:
        """Unregister the hook: the framework calls it no more. Idempotent."""


class HookInstaller(Protocol[P_contra]):
    """Installer of hooks of parameters' gradients in a framework.

    A framework without such hooks keeps a list of its own, and calls :meth:`BackwardPassCounter.accumulated` itself.

    Attributes:
        extra_backward_hint: The user's remedy in this framework where another loss has made gradients once more than
            expected, as sentences.
    """

    @property
    def extra_backward_hint(self) -> str: ...

    def register(self, parameter: P_contra, hook: GradientHook) -> RemovableHook:
        """Call ``hook(parameter)`` on this rank, after each backward pass has added to the parameter's gradient."""
        ...

    def registered(self, parameter: P_contra) -> Iterable[object]:
        """Return the hooks of a parameter's gradient; hooks that are not hvdlab's may be among them."""
        ...


class GradientHook:
    """Hook that notifies a watcher, if it still exists, of an accumulated gradient.

    The parameter must not keep the watcher (and with it the optimizer) alive: in a notebook an optimizer is often
    made again for the same model, and the forgotten one would start reductions that no ``step()`` ever collects.
    """

    __slots__ = ("__weakref__", "_watcher")

    def __init__(self, watcher: BackwardPassCounter[Any]) -> None:
        self._watcher = weakref.ref(watcher)

    def __call__(self, parameter: Any) -> None:
        watcher = self._watcher()
        if watcher is not None:
            watcher.accumulated(parameter)

    @property
    def watcher(self) -> BackwardPassCounter[Any] | None:
        return self._watcher()


class BackwardPassCounter(ABC, Generic[P]):
    """Counter of a step's backward passes.

    A parameter has one watcher: the last one whose :meth:`watch` named it. An earlier one then stops altogether, and
    raises an error when it is used.

    Args:
        installer: Registers hooks with the framework.
        passes: How many backward passes make up a step.

    Attributes:
        settled: Whether the gradients have been reduced, and no backward pass was made since.
        stepped: Whether a step has been taken, and no backward pass was made since.
        passes: As given, or as set since.
    """

    def __init__(self, installer: HookInstaller[P], passes: int) -> None:
        self.settled = self.stepped = False
        self.passes = passes
        self._installer = installer
        #: Each watched parameter, and how many backward passes of this step have not reached it yet.
        self._left: dict[P, int] = {}
        #: Whether a backward pass has reached any parameter since the last step.
        self._touched = False
        #: Whether the reduction was begun, and neither ended nor failed on all ranks.
        self._unfinished = False
        #: How many cells had failed when the step began: the rest of a step that a failed cell has left is void.
        self._failed_cells = 0
        #: The registered hooks, which :meth:`retire` removes.
        self._hooks: list[RemovableHook] = []
        #: Whether another watcher has taken over a parameter.
        self._replaced = False

    # -- set-up -------------------------------------------------------------------------------------------------------

    def watch(self, name: str, parameters: Iterable[P]) -> None:
        """Reduce these parameters together, under this name, from now on."""
        for parameter in parameters:
            previous = self._watcher_of(parameter)
            if previous is not None and previous is not self:
                # First: the former watcher waits for its allreduces in flight, which write to the gradients
                # that this one is about to reduce.
                previous.retire()
            self._left[parameter] = self.passes
            self._hooks.append(self._installer.register(parameter, GradientHook(self)))

    def _watcher_of(self, parameter: P) -> BackwardPassCounter[Any] | None:
        """Return the watcher of this parameter's gradient so far."""
        hooks = self._installer.registered(parameter)
        found = (hook.watcher for hook in hooks if isinstance(hook, GradientHook))
        return next((watcher for watcher in found if watcher is not None), None)

    @property
    def watching(self) -> bool:
        """Return whether it sees backward passes at all: not, for example, on a rank outside the process set."""
        return bool(self._left)

    def watches(self, parameter: P) -> bool:
        return parameter in self._left

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes make up a step; takes effect at once."""
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def retire(self) -> None:
        """Stop: another watcher has taken over a parameter."""
        self.drop()
        self._replaced = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def in_progress(self) -> bool:
        """Return whether a backward pass has been made since the last step (and not in a cell that failed)."""
        self._drop_abandoned_step()
        return self._touched

    def accumulated(self, parameter: P) -> None:
        """Count an accumulation that a backward pass made in the parameter's gradient. Called by the hook.

        Raises:
            AssertionError: Backward passes have done so more often than ``passes`` since the last step.
        """
        # Before this pass counts: on top of the half step that a failed cell has left, it would be one too
        # many.
        self._drop_abandoned_step()
        if not self._touched:
            self._touched, self._failed_cells = True, context.engine().failed_cells
            self.settled = self.stepped = False
        left = self._left[parameter]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more often than backward_passes_per_step since the last step(). Call step() "
                "(or synchronize()) after each backward_passes_per_step backward passes, or increase it to accumulate "
                f"more of them locally. {self._installer.extra_backward_hint}"
            )
        self._left[parameter] = left - 1
        if left == 1:
            self.complete(parameter)

    @abstractmethod
    def complete(self, parameter: P) -> None:
        """Start work on a parameter whose gradient has been accumulated often enough."""

    @abstractmethod
    def drop(self) -> None:
        """Give up the running step: wait for the operations in flight, ignore their outcome, and begin again."""

    def check(self) -> None:
        """Raise ``InvalidRequestError`` if another watcher has taken over."""
        if self._replaced:
            raise InvalidRequestError(
                "This DistributedOptimizer no longer reduces gradients: a newer one was made for its parameters. Use "
                "that one."
            )

    def reset(self) -> None:
        """Begin a new step."""
        self._touched = self._unfinished = False
        self._left = dict.fromkeys(self._left, self.passes)

    def _drop_abandoned_step(self) -> None:
        """Drop a step that a failed cell left half done, or that was interrupted while it was synchronized."""
        if self._unfinished or (self._touched and self._failed_cells != context.engine().failed_cells):
            self.drop()


Groups = int | Sequence[Sequence[K]]
"""Number of groups to form (0: none), or the groups themselves."""


def check_unique(names: Sequence[str], argument: str) -> None:
    """Check that no name comes twice; ``argument`` is the argument in which the user gave them, for the error's text.

    Raises:
        InvalidRequestError: A name comes twice.
    """
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise InvalidRequestError(
            f"Parameter names in {argument} must be unique; these are not: {', '.join(twice)}."
        )


def bucketed(
    parameters: Sequence[P],
    names: Mapping[P, str],
    groups: Groups[P],
    is_parameter: Callable[[Any], bool],
) -> list[tuple[str, list[P]]]:
    """Divide parameters into buckets, whose gradients are reduced together.

    Args:
        parameters: In the optimizer's order, which is the same on all ranks.
        names: The tensor name of each one's gradient.
        groups: A number of groups of about equal length, or lists of parameters; a parameter in no list gets a
            bucket of its own.
        is_parameter: Whether an object is a parameter; a group holds only parameters.

    Returns:
        Of each bucket the name, which is that of its first gradient with the number of the others, and the parameters.

    Raises:
        InvalidRequestError: A parameter is in the lists more than once, a list has another object in it, or ``groups`` is
            negative or neither a number nor lists.
    """
    together = _even(parameters, groups) if isinstance(groups, int) else _listed(groups)
    members = [parameter for group in together for parameter in group]
    if not all(map(is_parameter, members)):
        raise InvalidRequestError("groups= takes a number, or a list of lists of parameters.")
    if len(set(members)) != len(members):
        raise InvalidRequestError("A parameter is in groups= more than once.")
    chosen = set(parameters)
    together = [kept for group in together if (kept := [p for p in group if p in chosen])]
    grouped = {parameter for group in together for parameter in group}
    together += [[parameter] for parameter in parameters if parameter not in grouped]
    return [
        (names[group[0]] if len(group) == 1 else f"{names[group[0]]}+{len(group) - 1}", group)
        for group in together
    ]


def _even(parameters: Sequence[P], count: int) -> list[list[P]]:
    """Return ``count`` runs of neighbours whose lengths differ by at most one."""
    if count < 0:
        raise InvalidRequestError(f"groups= takes a number of groups, not {count}.")
    count = min(count, len(parameters))
    bounds = [len(parameters) * i // count for i in range(count + 1)] if count else [0]
    return [list(parameters[a:b]) for a, b in pairwise(bounds)]


def _listed(groups: Sequence[Sequence[P]]) -> list[list[P]]:
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidRequestError("groups= takes a number, or a list of lists of parameters.")
    return [list(group) for group in groups if group]


class BackwardPass(Protocol):
    """Backward pass that runs on this thread, as its framework knows it."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the backward pass ends, unless it fails.

        A callback may give another one, which is called after all that were given before. Does nothing outside of a backward pass, or if
        the framework does not report when one ends.
        """


class SubmissionBatcher:
    """Batcher of gradients' submissions: has those that are held submitted and announced together. For one thread at a time.

    Args:
        backward: Has the rest announced at the end of the backward pass.
        reducer: Submits the held gradients. It owns the batcher, which refers to it weakly.
    """

    def __init__(self, backward: BackwardPass, reducer: GradientReducer[Any, Any]) -> None:
        self._backward = backward
        self._reducer = weakref.ref(reducer)
        #: Held bytes, since when (``time.monotonic()``), and whether any are held.
        self._bytes = 0
        self._since = 0.0
        self._waiting = False

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more held bytes, and announce them now, or by the end of the backward pass.

        Outside a backward pass the thread that waits for them announces them.
        """
        now = time.monotonic()
        if not self._waiting:
            self._waiting, self._bytes, self._since = True, 0, now
            here: weakref.ref[SubmissionBatcher] = weakref.ref(self)
            self._backward.at_end(lambda: _end_backward(here))
        self._bytes += nbytes
        if self._bytes >= ENOUGH_BYTES or now - self._since >= LONGEST_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Submit and announce the held gradients, if any."""
        if self._waiting:
            self._submit_held()
            context.engine().flush()

    def on_backward_end(self) -> None:
        """Submit the rest at the end of the backward pass, and announce it once all batchers of that pass have submitted theirs.

        Two of them may have used one name. That is found on every rank alike if nothing is executed in between.
        """
        if self._waiting:
            self._submit_held()
            self._backward.at_end(_flush)

    def _submit_held(self) -> None:
        # First: if a bucket is refused, add() must begin afresh in the next backward pass.
        self._waiting = False
        reducer = self._reducer()
        if reducer is not None:
            reducer.start_held()

    def discard(self) -> None:
        """Discard the held gradients: their reduction has ended."""
        self._waiting = False


def _end_backward(batcher: weakref.ref[SubmissionBatcher]) -> None:
    found = batcher()
    if found is not None and context.is_initialized():
        found.on_backward_end()


def _flush() -> None:
    if context.is_initialized():
        context.engine().flush()


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
        reduction = PLAIN[self.op]
        if self.op is Average:
            reduction = Reduction(Average, 1.0 / self.predivide, self.predivide)
        return Operation(OpKind.ALLREDUCE, reduction, process_set=set_id(self.process_set))


class GradientAdapter(HookInstaller[P_contra], BackwardPass, Protocol[P_contra, T]):
    """Access to a framework's parameters and their gradients. One object for each reducer, so it can keep state.

    All functions are called on the thread of the backward pass, or of ``synchronize``.

    Attributes:
        duplicate_name_hint: The meaning, and the user's remedy in this framework, if two optimizers reduce gradients of the
            same name at once, as sentences.
    """

    @property
    def duplicate_name_hint(self) -> str: ...

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
        self._batcher = SubmissionBatcher(adapter, self)
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
            self._batcher.add(bucket.nbytes)

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
        # Before anything starts: an interrupt from here on leaves buckets in flight, for which the next
        # backward pass has to wait.
        self._unfinished = True
        self._start_all(self._buckets)
        try:
            self._collect()
        # Not Ctrl-C, after which buckets are still in flight: with ``_unfinished`` set, the next backward
        # pass drops them.
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
                    self.start_held()
            for bucket in self._buckets:
                for work in bucket.work or ():
                    with contextlib.suppress(*FAILURES):
                        synchronize(work.handle)
        finally:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self._batcher.discard()
        self._held.clear()
        self._operation = None
        for bucket in self._buckets:
            bucket.ready, bucket.work = 0, None

    # -- a bucket -----------------------------------------------------------------------------------------------------

    def _dense_bytes(self, bucket: _Bucket[P, T]) -> int:
        adapter = self._adapter
        gradients = [adapter.gradient(parameter) for parameter in bucket.parameters]
        return adapter.nbytes([gradient for gradient in gradients if not adapter.is_sparse(gradient)])

    def start_held(self) -> None:
        """Start the allreduces that are due. If one is refused, :meth:`synchronize` starts those behind it."""
        # Emptied before: a bucket that is refused would otherwise be tried again, and refused again, in each
        # turn.
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
                error.name, error.first_site, error.second_site, self._adapter.duplicate_name_hint
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

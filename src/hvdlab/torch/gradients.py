"""Reduction of gradients while the backward pass still runs.

A *bucket* is one parameter, or a group of them that is reduced together. As soon as the gradients of all its
parameters have been accumulated ``passes`` times, its allreduce is started; :meth:`GradientReducer.synchronize`
starts those that this rank's backward pass did not reach (another rank's may have) and waits for all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.errors import (
    CollectiveError,
    DuplicateNameError,
    InvalidRequestError,
    UnsupportedError,
)
from hvdlab.torch.arguments import Average
from hvdlab.torch.compression import Compressor
from hvdlab.torch.handles import FAILURES, Handle, synchronize
from hvdlab.torch.process_sets import ProcessSet, set_id
from hvdlab.torch.sparse import sparse_allreduce_async
from hvdlab.torch.submission import Operation, submit, submit_group


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients are reduced; see :func:`hvdlab.torch.optimizer.DistributedOptimizer`."""

    compression: type[Compressor]
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def operation(self) -> Operation:
        """The allreduce of a bucket; for an average the division is split around the sum."""
        before, after = (1.0 / self.predivide, self.predivide) if self.op is Average else (1.0, 1.0)
        return Operation(OpKind.ALLREDUCE, self.op, before, after, process_set=set_id(self.process_set))


class _InFlight:
    """The allreduce of a bucket: its handle, and what each parameter's result needs to be decompressed."""

    __slots__ = ("contexts", "handle")

    def __init__(self, handle: Handle, contexts: list[Any]) -> None:
        self.handle = handle
        self.contexts = contexts


class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        name: Tensor name in the core.
        parameters: Its parameters.
        ready: How many of them have been accumulated often enough.
        work: The allreduce, once it is started.
    """

    __slots__ = ("name", "parameters", "ready", "work")

    def __init__(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.ready = 0
        self.work: _InFlight | None = None


class _Hook:
    """Tells a reducer, if there still is one, that a gradient has been accumulated.

    The parameter must not keep the reducer (and with it the optimizer) alive: in a notebook an optimizer is often
    made anew for the same model, and nobody would collect what the forgotten one starts.
    """

    __slots__ = ("__weakref__", "_reducer")

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = weakref.ref(reducer)

    def __call__(self, parameter: torch.Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.accumulated(parameter)

    @property
    def reducer(self) -> GradientReducer | None:
        return self._reducer()


def _reducer_of(parameter: torch.Tensor) -> GradientReducer | None:
    """Who reduces this parameter's gradient so far."""
    hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = (hook.reducer for hook in hooks.values() if isinstance(hook, _Hook))
    return next((reducer for reducer in found if reducer is not None), None)


class GradientReducer:
    """Starts allreduces from hooks of the backward pass, and collects them.

    A parameter's gradient is reduced by one reducer: the last that was told to :meth:`watch` it. An earlier one then
    stops altogether, and says so when it is used.
    """

    def __init__(self, settings: ReductionSettings, passes: int) -> None:
        self._settings = settings
        self._passes = passes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._left: dict[torch.Tensor, int] = {}
        self._touched = False
        self._unfinished = False  # synchronize() was begun, and neither ended nor failed on all ranks
        self._failed_cells = 0
        self._hooks: list[RemovableHandle] = []
        self._replaced = False

    # -- set-up -------------------------------------------------------------------------------------------------------

    def watch(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce the gradients of these parameters together, under this name, from now on."""
        bucket = _Bucket(name, list(parameters))
        self._buckets.append(bucket)
        for parameter in bucket.parameters:
            previous = _reducer_of(parameter)
            if previous is not None and previous is not self:
                previous.retire()
            self._bucket_of[parameter] = bucket
            self._left[parameter] = self._passes
            hook = parameter.register_post_accumulate_grad_hook(_Hook(self))  # type: ignore[no-untyped-call]  # torch's
            self._hooks.append(hook)

    def watches(self, parameter: torch.Tensor) -> bool:
        return parameter in self._bucket_of

    def set_passes(self, passes: int) -> None:
        """Change how many backward passes make up a step; takes effect at once."""
        self._passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def retire(self) -> None:
        """Stop: another reducer has taken over a parameter."""
        self.drop()
        self._replaced = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def in_progress(self) -> bool:
        """Whether a backward pass has been made since the last step (and not in a cell that failed)."""
        self._drop_what_was_given_up()
        return self._touched

    # -- a step -------------------------------------------------------------------------------------------------------

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Hook: autograd has added to ``parameter.grad``."""
        self._drop_what_was_given_up()
        if not self._touched:
            self._touched, self._failed_cells = True, context.engine().failed_cells
        left = self._left[parameter]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more often than backward_passes_per_step since the last step(). Call step() "
                "(or synchronize()) after each backward_passes_per_step backward passes, or increase it to accumulate "
                "more of them locally."
            )
        self._left[parameter] = left - 1
        if left == 1:
            bucket = self._bucket_of[parameter]
            bucket.ready += 1
            if bucket.ready == len(bucket.parameters):
                self._start(bucket)

    def synchronize(self) -> None:
        """Reduce what is still missing, wait for all, and leave the results in the parameters' ``grad``.

        Parameters without a gradient get one of zeros, since another rank may have one. After an error, the gradients
        are undefined and the next backward pass starts afresh.
        """
        if self._replaced:
            raise InvalidRequestError(
                "This DistributedOptimizer no longer reduces gradients: a newer one was made for its parameters. Use "
                "that one."
            )
        if self._unfinished:
            self.drop()
        self._unfinished = True
        for bucket in self._buckets:
            if bucket.work is None:
                self._start(bucket)
        try:
            self._collect()
        except FAILURES:
            self._reset()
            raise
        self._reset()

    def drop(self) -> None:
        """Give up the running step: wait for what is in flight, whatever comes of it, and begin anew."""
        try:
            for bucket in self._buckets:
                if bucket.work is not None:
                    with contextlib.suppress(*FAILURES):
                        synchronize(bucket.work.handle)
        finally:
            self._reset()

    def _drop_what_was_given_up(self) -> None:
        """A step that a failed cell left half done, or that was interrupted while it was synchronized, is void."""
        if self._unfinished or (self._touched and self._failed_cells != context.engine().failed_cells):
            self.drop()

    def _reset(self) -> None:
        self._touched = self._unfinished = False
        self._left = dict.fromkeys(self._left, self._passes)
        for bucket in self._buckets:
            bucket.ready, bucket.work = 0, None

    def _start(self, bucket: _Bucket) -> None:
        gradients = [self._gradient(parameter) for parameter in bucket.parameters]
        settings = self._settings
        operation = settings.operation()
        if any(gradient.is_sparse for gradient in gradients):
            bucket.work = _InFlight(self._start_sparse(bucket, gradients), [None])
            return
        with torch.no_grad():
            compressed = [settings.compression.compress(gradient) for gradient in gradients]
        sent = [tensor for tensor, _ in compressed]
        if len(sent) == 1:
            handle = submit(operation, sent[0], bucket.name, in_place=True)
        else:
            handle = submit_group(operation, sent, bucket.name, in_place=True)
        bucket.work = _InFlight(handle, [context for _, context in compressed])

    def _start_sparse(self, bucket: _Bucket, gradients: list[torch.Tensor]) -> Handle:
        if len(gradients) > 1:
            raise UnsupportedError(
                f"The sparse gradients in `{bucket.name}` can't be reduced as a group; "
                "give DistributedOptimizer sparse_as_dense=True, or leave them out of groups=."
            )
        return sparse_allreduce_async(
            gradients[0], bucket.name, self._settings.op, self._settings.process_set
        )

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        elif gradient.requires_grad:
            raise AssertionError(
                "A gradient that requires gradients itself (create_graph=True) can't be reduced in place; "
                "detach it before, or use hvd.allreduce in the loss."
            )
        elif gradient.is_sparse and self._settings.sparse_as_dense:
            gradient = parameter.grad = gradient.to_dense()
        return gradient

    def _collect(self) -> None:
        """Wait for every bucket, also after one has failed: no gradient may be written to after this."""
        failure: CollectiveError | DuplicateNameError | None = None
        for bucket in self._buckets:
            assert bucket.work is not None
            try:
                result = synchronize(bucket.work.handle)
            except FAILURES as error:
                failure = failure or error
                continue
            outputs = result if isinstance(result, list) else [result]
            self._install(bucket, outputs, bucket.work.contexts)
        if failure is not None:
            raise failure

    def _install(self, bucket: _Bucket, outputs: list[torch.Tensor], contexts: list[Any]) -> None:
        with torch.no_grad():
            for parameter, output, context in zip(bucket.parameters, outputs, contexts, strict=True):
                reduced = self._settings.compression.decompress(output, context)
                if reduced.is_sparse:
                    parameter.grad = reduced
                elif parameter.grad is not reduced and parameter.grad is not None:
                    parameter.grad.copy_(reduced)

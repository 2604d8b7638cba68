"""Reduction of gradients while the backward pass still runs.

A *bucket* is one parameter, or a group of them that is reduced together. As soon as the gradients of all its
parameters have been accumulated often enough, its allreduce is started; :meth:`GradientReducer.synchronize`
starts those that this rank's backward pass did not reach (another rank's may have) and waits for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlab.bindings.arguments import Average
from hvdlab.bindings.handles import FAILURES, Handle, synchronize
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.errors import CollectiveError, DuplicateNameError
from hvdlab.torch.adapter import BINDING, as_stored
from hvdlab.torch.announcing import Announcer
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.hooks import ANOTHER_LOSS, Watcher
from hvdlab.torch.process_sets import ProcessSet, set_id
from hvdlab.torch.sparse import sparse_allreduce_async

_NAMES_TWICE = (
    "it is a gradient, of which another DistributedOptimizer has one of this name. Give both named_parameters=, with "
    "names of their own: [(f'D.{name}', p) for name, p in D.named_parameters()]. "
    f"{ANOTHER_LOSS}"
)


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


@dataclass(slots=True)
class _InFlight:
    """An allreduce of a bucket's gradients.

    Attributes:
        handle: Its handle.
        parameters: Whose gradients.
        contexts: What each of them needs to be decompressed.
        outputs: Where the results are, if the handle does not yield them.
    """

    handle: Handle
    parameters: Sequence[torch.Tensor]
    contexts: Sequence[Any]
    outputs: Sequence[torch.Tensor] | None = None


class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        name: Tensor name in the core.
        parameters: Its parameters.
        ready: How many of them have been accumulated often enough.
        work: What is in flight: one allreduce of all dense gradients, one for each sparse one; ``None`` if it has not
            been started.
    """

    __slots__ = ("name", "parameters", "ready", "work")

    def __init__(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.ready = 0
        self.work: list[_InFlight] | None = None


class GradientReducer(Watcher):
    """Starts allreduces from hooks of the backward pass, and collects them."""

    def __init__(self, settings: ReductionSettings, passes: int) -> None:
        super().__init__(passes)
        self._settings = settings
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._announcer = Announcer()
        self._operation: Operation | None = (
            None  # of this step: a process set's number may be another in the next
        )
        #: Of each parameter that has had sparse gradients: by how many dimensions its entries are found.
        self._sparse_dims: dict[torch.Tensor, int] = {}

    def watch(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        bucket = _Bucket(name, list(parameters))
        super().watch(name, bucket.parameters)
        self._buckets.append(bucket)
        self._bucket_of.update(dict.fromkeys(bucket.parameters, bucket))

    def complete(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of[parameter]
        bucket.ready += 1
        if bucket.ready == len(bucket.parameters):
            self._start(bucket)

    def synchronize(self) -> None:
        """Reduce what is still missing, wait for all, and leave the results in the parameters' ``grad``.

        Parameters without a gradient get one of zeros, since another rank may have one. After an error, the gradients
        are undefined and the next backward pass starts afresh.
        """
        self.check()
        if self._unfinished:
            self.drop()
        self._unfinished = True
        for bucket in self._buckets:
            if bucket.work is None:
                self._start(bucket)
        try:
            self._collect()
        except FAILURES:
            self.reset()
            raise
        self.reset()
        self.settled = True

    def drop(self) -> None:
        try:
            for bucket in self._buckets:
                for work in bucket.work or ():
                    with contextlib.suppress(*FAILURES):
                        synchronize(work.handle)
        finally:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self._announcer.forget()
        self._operation = None
        for bucket in self._buckets:
            bucket.ready, bucket.work = 0, None

    # -- a bucket -----------------------------------------------------------------------------------------------------

    def _start(self, bucket: _Bucket) -> None:
        try:
            self._submit(bucket)
        except DuplicateNameError as error:
            raise DuplicateNameError(error.name, error.first_site, error.second_site, _NAMES_TWICE) from None

    def _submit(self, bucket: _Bucket) -> None:
        parameters = bucket.parameters
        gradients = [self._gradient(parameter) for parameter in parameters]
        if not any(gradient.is_sparse for gradient in gradients):
            bucket.work = [self._start_dense(bucket.name, parameters, gradients)]
            return
        pairs = list(zip(parameters, gradients, strict=True))
        dense = [(parameter, gradient) for parameter, gradient in pairs if not gradient.is_sparse]
        bucket.work = [self._start_dense(bucket.name, *zip(*dense, strict=True))] if dense else []
        for number, (parameter, gradient) in enumerate(pairs):
            if gradient.is_sparse:
                name = f"{bucket.name}.sparse{number}"
                bucket.work.append(self._start_sparse(name, parameter, gradient))

    def _start_dense(
        self, name: str, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> _InFlight:
        operation = self._operation
        if operation is None:
            operation = self._operation = self._settings.operation()
        if self._settings.compression is Compression.none:
            sent, contexts = list(gradients), [None] * len(gradients)
        else:
            with torch.no_grad():
                pairs = [self._settings.compression.compress(gradient) for gradient in gradients]
            sent, contexts = [tensor for tensor, _ in pairs], [context for _, context in pairs]
        views = _as_stored(parameters, sent)
        if len(views) == 1:
            handle = BINDING.submit(operation, views[0], name, in_place=True, announce=False)
        else:
            handle = BINDING.submit_group(operation, views, name, in_place=True, announce=False)
        self._announcer.hold(sum([tensor.nbytes for tensor in sent]))
        return _InFlight(handle, parameters, contexts, sent)

    def _start_sparse(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> _InFlight:
        handle = sparse_allreduce_async(gradient, name, self._settings.op, self._settings.process_set)
        return _InFlight(handle, [parameter], [None])

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank has to give for a parameter: its gradient, or zeros."""
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse_dims and not self._settings.sparse_as_dense:
                return nothing_of(parameter, self._sparse_dims[parameter])
            gradient = torch.zeros_like(parameter, requires_grad=False)
            if parameter.requires_grad:
                parameter.grad = gradient
        elif gradient.requires_grad:
            raise AssertionError(
                "A gradient that requires gradients itself (create_graph=True) can't be reduced in place; "
                "detach it before, or use hvd.allreduce in the loss."
            )
        elif gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
            if self._settings.sparse_as_dense:
                gradient = parameter.grad = gradient.to_dense()
        return gradient

    def _collect(self) -> None:
        """Wait for every bucket, also after one has failed: no gradient may be written to after this."""
        failure: CollectiveError | DuplicateNameError | None = None
        for work in (work for bucket in self._buckets for work in bucket.work or ()):
            try:
                result = synchronize(work.handle)
            except FAILURES as error:
                failure = failure or error
                continue
            self._install(work, [result] if work.outputs is None else work.outputs)
        if failure is not None:
            raise failure

    def _install(self, work: _InFlight, outputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, output, context in zip(work.parameters, outputs, work.contexts, strict=True):
                reduced = self._settings.compression.decompress(output, context)
                if reduced.is_sparse:
                    parameter.grad = reduced
                elif parameter in self._sparse_dims and parameter.grad is not None:
                    # Reduced as a dense one: some optimizers take sparse gradients only, others what is zero for one.
                    parameter.grad = reduced.to(parameter.dtype).to_sparse(self._sparse_dims[parameter])
                elif parameter.grad is None:
                    # Frozen here: it keeps having no gradient, as without hvdlab, unless another rank has one.
                    if reduced.any():
                        parameter.grad = reduced
                elif parameter.grad is not reduced:
                    parameter.grad.copy_(reduced)


def _as_stored(parameters: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What is sent, so that it need not be copied where it lies in memory in another order, as its parameter does.

    Parameters lie in memory alike on all ranks; what else a user makes a gradient of may not.
    """
    if all(tensor.is_contiguous() for tensor in sent):
        return sent
    return [
        as_stored(tensor) if tensor.stride() == parameter.stride() else tensor
        for parameter, tensor in zip(parameters, sent, strict=True)
    ]


def nothing_of(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse gradient without entries."""
    values = parameter.new_empty((0, *parameter.shape[sparse_dims:]), requires_grad=False)
    indices = torch.empty((sparse_dims, 0), dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)

"""``DistributedOptimizer(op=hvd.Adasum)``: each rank takes a step of its own, and Adasum combines the steps.

Adasum combines the changes that the ranks' optimizers make, not the gradients, so that an optimizer's own scaling (Adam's, say)
has been applied before: each parameter becomes its value before the step plus the Adasum of the ranks' changes of it.
See :mod:`hvdlab.collectives.reduce.adasum` for the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvdlab.bindings.gradient_reducer import ReductionSettings
from hvdlab.bindings.handles import Handle, wait_for_all
from hvdlab.bindings.hooks import GradientWatcher
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.torch.adapter import BINDING
from hvdlab.torch.compression import Compressor
from hvdlab.torch.distributed import DistributedBase
from hvdlab.torch.gradients import TorchGradients
from hvdlab.torch.process_sets import ProcessSet, set_id


class ChangeReducer(GradientWatcher[torch.Tensor]):
    """Combines the changes that the ranks' steps make to the parameters.

    Args:
        compression: The compressor that changes are sent through.
        process_set: The ranks whose changes are combined.
        passes: How many backward passes make up a step.
    """

    def __init__(self, compression: type[Compressor], process_set: ProcessSet, passes: int) -> None:
        super().__init__(TorchGradients(), passes)
        self._compression = compression
        self._process_set = process_set
        self._buckets: list[tuple[str, list[torch.Tensor]]] = []

    def watch(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        bucket = list(parameters)
        super().watch(name, bucket)
        self._buckets.append((name, bucket))

    def complete(self, parameter: torch.Tensor) -> None:
        """Does nothing: changes can be combined only after the rank's optimizer has taken its step."""

    def drop(self) -> None:
        self.reset()

    @torch.no_grad()
    def around(self, step: Callable[[], Any]) -> Any:
        """Take this rank's step, and replace it by the Adasum of all ranks' steps.

        Args:
            step: Changes the parameters as this rank's optimizer does.

        Returns:
            What ``step`` returns.

        After an error or Ctrl-C the parameters have the values that they had before.
        """
        self.check()
        watched = [parameter for _, bucket in self._buckets for parameter in bucket]
        starts = {parameter: parameter.detach().clone() for parameter in watched}
        try:
            with torch.enable_grad():
                result = step()
            changes = {parameter: parameter.detach() - start for parameter, start in starts.items()}
            for parameter, change in self._reduced(changes):
                parameter.copy_(starts[parameter] + change)
        except BaseException:
            for parameter, start in starts.items():
                parameter.copy_(start)
            raise
        finally:
            self.reset()
        return result

    def _reduced(
        self, changes: dict[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        operation = Operation(OpKind.ALLREDUCE, ReduceOp.ADASUM, process_set=set_id(self._process_set))
        started: list[tuple[list[torch.Tensor], Handle, list[Any]]] = []
        for name, bucket in self._buckets:
            compressed = [self._compression.compress(changes[parameter]) for parameter in bucket]
            sent = [tensor for tensor, _ in compressed]
            handle = (
                BINDING.submit(operation, sent[0], name, in_place=True)
                if len(sent) == 1
                else BINDING.submit_group(operation, sent, name, in_place=True)
            )
            started.append((bucket, handle, [context for _, context in compressed]))
        results = wait_for_all([handle for _, handle, _ in started])
        for (bucket, _, contexts), outputs in zip(started, results, strict=True):
            listed = outputs if isinstance(outputs, list) else [outputs]
            for parameter, output, context in zip(bucket, listed, contexts, strict=True):
                yield parameter, self._compression.decompress(output, context)


class AdasumMixin(DistributedBase):
    """Takes the given optimizer's step on each rank, and combines the steps by Adasum."""

    _watcher: ChangeReducer  # pyright: ignore[reportIncompatibleVariableOverride]  # assigned once

    def _watcher_for(self, settings: ReductionSettings) -> ChangeReducer:
        return ChangeReducer(settings.compression, settings.process_set, self._watcher.passes)

    def synchronize(self) -> None:
        """Does nothing: there is nothing to reduce before :meth:`step`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not with Adasum, as in Horovod: raises ``AssertionError``."""
        raise AssertionError(
            "skip_synchronize() does not go with op=hvd.Adasum, which combines the ranks' steps, not their gradients."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this rank's gradients, and replace it by the Adasum of all ranks' steps.

        Args:
            closure: Recomputes the loss with its gradients. Each rank's optimizer may call it as often as it needs.

        Returns:
            What the given optimizer's ``step`` returns: the loss of this rank, if there is a closure.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``. Parameters have the values from before the step; the optimizer's
                state (momenta, ...) has already changed by this rank's step.
        """
        if not self._included:
            return self._plain_step(closure)
        if closure is None:
            self._warn_of_a_step_without_backward()
        self._watch(0)  # parameters that were unfrozen since the last step
        own = None if closure is None else self._counted_anew(closure)
        return self._watcher.around(lambda: self._plain_step(own))

    def _counted_anew(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with the count of backward passes set back to zero before and after each call."""

        def counted() -> Any:
            self._watcher.reset()
            loss = closure()
            self._watcher.reset()
            return loss

        return counted

    step.hooked = True  # type: ignore[attr-defined]  # see DistributedMixin.step

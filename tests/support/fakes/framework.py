"""A framework that tests make: parameters of numpy arrays, hooks and backward passes in plain Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.gradient_reducer import GradientHook, ReductionSettings
from hvdlab.bindings.handles import Handle

Array = npt.NDArray[Any]


class Parameter:
    """Parameter, whose gradient is an array, or ``None``."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.grad: Array | None = None
        self.hooks: list[GradientHook] = []


class _Registered:
    def __init__(self, parameter: Parameter, hook: GradientHook) -> None:
        self._parameter, self._hook = parameter, hook

    def remove(self) -> None:
        if self._hook in self._parameter.hooks:
            self._parameter.hooks.remove(self._hook)


class FakeGradients:
    """``GradientAdapter`` of dense gradients."""

    extra_backward_hint = "Look for another loss."
    duplicate_name_hint = "name your optimizers."

    def __init__(self) -> None:
        #: The callbacks due at the end of the backward pass that runs; ``None`` outside of one.
        self.at_its_end: list[Callable[[], None]] | None = None

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass; its end is not reached if it fails."""
        callbacks: list[Callable[[], None]] = []
        self.at_its_end = callbacks
        try:
            yield
            for callback in callbacks:  # one may add another
                callback()
        finally:
            self.at_its_end = None

    def run_backward(self, gradients: Mapping[Parameter, float]) -> None:
        """Run a backward pass that adds these numbers to the gradients, in this order."""
        with self.backward():
            for parameter, value in gradients.items():
                added = np.full(parameter.size, value, np.float32)
                parameter.grad = added if parameter.grad is None else parameter.grad + added
                for hook in list(parameter.hooks):
                    hook(parameter)

    def register(self, parameter: Parameter, hook: GradientHook) -> _Registered:
        parameter.hooks.append(hook)
        return _Registered(parameter, hook)

    def registered(self, parameter: Parameter) -> Sequence[object]:
        return ["a hook of someone else", *parameter.hooks]

    def at_end(self, callback: Callable[[], None]) -> None:
        if self.at_its_end is not None:
            self.at_its_end.append(callback)

    def untracked(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def gradient(self, parameter: Parameter) -> Array:
        if parameter.grad is None:
            return np.zeros(parameter.size, np.float32)
        return parameter.grad

    def is_sparse(self, gradient: Array) -> bool:
        return False

    def reduce_sparse(self, gradient: Array, name: str, settings: ReductionSettings) -> Handle:
        raise AssertionError("no gradient is sparse here")

    def as_sent(self, parameters: Sequence[Parameter], tensors: Sequence[Array]) -> Sequence[Array]:
        return tensors

    def nbytes(self, tensors: Sequence[Array]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def install(self, parameter: Parameter, reduced: Array) -> None:
        parameter.grad = reduced

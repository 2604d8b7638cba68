"""Who is told of the gradients of a backward pass, and how far a step has come."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError

ANOTHER_LOSS = (
    "If it was another loss that reached these parameters, as a GAN's generator loss reaches the discriminator's, keep "
    "it from making their gradients: call requires_grad_(False) on that module before that loss is computed, and "
    "requires_grad_(True) after its backward pass."
)
"""What may have happened where the gradients of parameters were made once more than expected, and what to do."""


class _Hook:
    """Tells a watcher, if there still is one, that a gradient has been accumulated.

    The parameter must not keep the watcher (and with it the optimizer) alive: in a notebook an optimizer is often
    made anew for the same model, and nobody would collect what the forgotten one starts.
    """

    __slots__ = ("__weakref__", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher)

    def __call__(self, parameter: torch.Tensor) -> None:
        watcher = self._watcher()
        if watcher is not None:
            watcher.accumulated(parameter)

    @property
    def watcher(self) -> Watcher | None:
        return self._watcher()


def _watcher_of(parameter: torch.Tensor) -> Watcher | None:
    """Who watches this parameter's gradient so far."""
    hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = (hook.watcher for hook in hooks.values() if isinstance(hook, _Hook))
    return next((watcher for watcher in found if watcher is not None), None)


class Watcher(ABC):
    """Counts the backward passes of a step.

    A parameter has one watcher: the last that was told to :meth:`watch` it. An earlier one then stops altogether, and
    says so when it is used.

    Attributes:
        settled: Whether the gradients have been reduced, and no backward pass was made since.
        stepped: Whether a step has been taken, and no backward pass was made since.
        passes: How many backward passes make up a step.
    """

    def __init__(self, passes: int) -> None:
        self.settled = self.stepped = False
        self.passes = passes
        self._left: dict[torch.Tensor, int] = {}
        self._touched = False
        self._unfinished = False  # the reduction was begun, and neither ended nor failed on all ranks
        self._failed_cells = 0
        self._hooks: list[RemovableHandle] = []
        self._replaced = False

    # -- set-up -------------------------------------------------------------------------------------------------------

    def watch(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce these parameters together, under this name, from now on."""
        for parameter in parameters:
            previous = _watcher_of(parameter)
            if previous is not None and previous is not self:
                previous.retire()
            self._left[parameter] = self.passes
            hook = parameter.register_post_accumulate_grad_hook(_Hook(self))  # type: ignore[no-untyped-call]  # torch's
            self._hooks.append(hook)

    @property
    def watching(self) -> bool:
        """Whether it is told of backward passes at all: not on a rank outside the process set, say."""
        return bool(self._left)

    def watches(self, parameter: torch.Tensor) -> bool:
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
        """Whether a backward pass has been made since the last step (and not in a cell that failed)."""
        self._drop_what_was_given_up()
        return self._touched

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Hook: autograd has added to ``parameter.grad``."""
        self._drop_what_was_given_up()
        if not self._touched:
            self._touched, self._failed_cells = True, context.engine().failed_cells
            self.settled = self.stepped = False
        left = self._left[parameter]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more often than backward_passes_per_step since the last step(). Call step() "
                "(or synchronize()) after each backward_passes_per_step backward passes, or increase it to accumulate "
                f"more of them locally. {ANOTHER_LOSS}"
            )
        self._left[parameter] = left - 1
        if left == 1:
            self.complete(parameter)

    @abstractmethod
    def complete(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient has been accumulated often enough."""

    @abstractmethod
    def drop(self) -> None:
        """Give up the running step: wait for what is in flight, whatever comes of it, and begin anew."""

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

    def _drop_what_was_given_up(self) -> None:
        """A step that a failed cell left half done, or that was interrupted while it was synchronized, is void."""
        if self._unfinished or (self._touched and self._failed_cells != context.engine().failed_cells):
            self.drop()

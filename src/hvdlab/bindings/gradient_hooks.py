"""Hooks on parameters' gradients: they count the backward passes of a training step.

A framework brings a :class:`HookInstaller`; subclasses of :class:`BackwardPassCounter` reduce the gradients of a step. Which
parameters' gradients are reduced together, and under which names, is decided here as well.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError

P = TypeVar("P", bound=Hashable)
"""A framework's parameter, or what stands for it if parameters can't be keys of a dictionary; equal only to itself."""
P_contra = TypeVar("P_contra", contravariant=True)


class RemovableHook(Protocol):
    """Registered hook, which can be removed."""

    def remove(self) -> None:
        """Unregister the hook: the framework calls it no more. Idempotent."""


class HookInstaller(Protocol[P_contra]):
    """Installer of hooks of parameters' gradients in a framework.

    A framework without such hooks keeps a list of its own, and calls :meth:`BackwardPassCounter.accumulated` itself.

    Attributes:
        another_loss: The user's remedy in this framework where another loss has made gradients once more than
            expected, as sentences.
    """

    @property
    def another_loss(self) -> str: ...

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
        registry: Where the framework registers hooks.
        passes: How many backward passes make up a step.

    Attributes:
        settled: Whether the gradients have been reduced, and no backward pass was made since.
        stepped: Whether a step has been taken, and no backward pass was made since.
        passes: As given, or as set since.
    """

    def __init__(self, registry: HookInstaller[P], passes: int) -> None:
        self.settled = self.stepped = False
        self.passes = passes
        self._registry = registry
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
                previous.retire()
            self._left[parameter] = self.passes
            self._hooks.append(self._registry.register(parameter, GradientHook(self)))

    def _watcher_of(self, parameter: P) -> BackwardPassCounter[Any] | None:
        """Return the watcher of this parameter's gradient so far."""
        hooks = self._registry.registered(parameter)
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
        self._drop_what_was_given_up()
        return self._touched

    def accumulated(self, parameter: P) -> None:
        """Count an accumulation that a backward pass made in the parameter's gradient. Called by the hook.

        Raises:
            AssertionError: Backward passes have done so more often than ``passes`` since the last step.
        """
        self._drop_what_was_given_up()
        if not self._touched:
            self._touched, self._failed_cells = True, context.engine().failed_cells
            self.settled = self.stepped = False
        left = self._left[parameter]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more often than backward_passes_per_step since the last step(). Call step() "
                "(or synchronize()) after each backward_passes_per_step backward passes, or increase it to accumulate "
                f"more of them locally. {self._registry.another_loss}"
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

    def _drop_what_was_given_up(self) -> None:
        """Drop a step that a failed cell left half done, or that was interrupted while it was synchronized."""
        if self._unfinished or (self._touched and self._failed_cells != context.engine().failed_cells):
            self.drop()


K = TypeVar("K")

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

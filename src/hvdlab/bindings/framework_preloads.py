"""What a process that forks ranks does for frameworks: which it imports, and what a fork must not share of them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.bindings import framework_hooks


class FrameworkPreloads:
    """A :class:`~hvdlab.launch.forkserver.program.Preloads` that needs nothing besides what is asked for.

    Args:
        training: Whether to import also what frameworks import when training begins, which takes as long again.

    Attributes:
        required: Nothing.
    """

    required: Sequence[str] = ()

    def __init__(self, *, training: bool) -> None:
        self._training = training

    def after_required(self) -> None:
        """Set the variables that frameworks read when they are imported."""
        framework_hooks.set_environment()

    def usual(self) -> Sequence[str]:
        """Frameworks whose hooks ask to be preloaded."""
        return tuple(name for name in framework_hooks.names() if framework_hooks.hooks_of(name).preload)

    def along_with(self, framework: str) -> Sequence[str]:
        """Our binding of a framework and, if that is wanted, what its training imports, by the framework's hooks."""
        if framework not in framework_hooks.names():
            return ()
        hooks = framework_hooks.hooks_of(framework)
        return (*((hooks.binding,) if hooks.binding else ()), *(hooks.training if self._training else ()))

    def refresh(self, threads: int) -> None:
        """New random states and thread pools for the frameworks that were imported before the fork."""
        for hooks in framework_hooks.loaded():
            hooks.reseed()
            hooks.set_threads(threads)

"""Imports of frameworks in a process that forks ranks, and the state of frameworks that a fork must not share."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.bindings import framework_hooks


class FrameworkPreloads:
    """A :class:`~hvdlab.launch.forkserver.program.Preloads` that adds nothing to the requested modules.

    Attributes:
        required: Nothing.
    """

    required: Sequence[str] = ()

    def after_required(self) -> None:
        """Set the variables that frameworks read when they are imported."""
        framework_hooks.set_environment()

    def usual(self) -> Sequence[str]:
        """Return frameworks whose hooks ask to be preloaded."""
        return tuple(name for name in framework_hooks.names() if framework_hooks.hooks_of(name).preload)

    def along_with(self, framework: str) -> Sequence[str]:
        """Return our binding of a framework, by the framework's hooks; an empty sequence for a framework without hooks."""
        known = framework in framework_hooks.names()
        binding = framework_hooks.hooks_of(framework).binding if known else ""
        return (binding,) if binding else ()

    def for_training(self) -> Sequence[str]:
        """Return the modules that the hooks of the imported frameworks name."""
        return [module for hooks in framework_hooks.loaded() for module in hooks.training]

    def refresh(self, threads: int) -> None:
        """Make new random states and thread pools for the frameworks that were imported before the fork."""
        for hooks in framework_hooks.loaded():
            hooks.reseed()
            hooks.set_threads(threads)

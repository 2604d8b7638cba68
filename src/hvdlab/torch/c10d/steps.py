"""Counts the steps that this process's optimizers take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    """Counts the steps of all optimizers together from now on, by torch's global hook.

    Steps that ``torch.compile`` compiles are not counted: the count would be a constant in the compiled code, which torch would
    compile again each time that it has changed.

    Attributes:
        taken: The count.
    """

    def __init__(self) -> None:
        self.taken = 0
        counts = weakref.ref(self)

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling() and (steps := counts()) is not None:
                steps.taken += 1

        hook = register_optimizer_step_post_hook(count)
        weakref.finalize(self, hook.remove)

"""How many steps this process's optimizers have taken."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    """Counts them from now on, all optimizers together, by a hook that torch has for observers.

    Steps that ``torch.compile`` has compiled are not counted: they would be compiled again for each count.

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

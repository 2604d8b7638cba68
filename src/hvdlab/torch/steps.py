"""The meter of an optimizer's steps."""

from __future__ import annotations

from typing import Any

import torch

from hvdlab.collectives.metrics.steps import StepMeter

_ATTRIBUTE = "_hvdlab_steps"


def meter_of(optimizer: torch.optim.Optimizer) -> StepMeter:
    """What measures this optimizer's steps; from the first call on it does.

    A distributed optimizer shares that of the optimizer that it was made from, as it shares its hooks.
    """
    found: StepMeter | None = vars(optimizer).get(_ATTRIBUTE)
    if found is None:
        found = meter = StepMeter()

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            meter.step()

        optimizer.register_step_post_hook(stepped)
        vars(optimizer)[_ATTRIBUTE] = found
    return found

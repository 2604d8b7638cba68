"""Measures the steps of a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch

from hvdlab.collectives.metrics.rank_metrics import StepMeter

_ATTRIBUTE = "_hvdlab_steps"


def meter_of(optimizer: torch.optim.Optimizer) -> StepMeter:
    """The meter of this optimizer's steps. The first call makes it, and registers a hook that counts the steps from then on.

    A distributed optimizer has the same meter as the optimizer that it was made from, since it has the same hooks.
    """
    found: StepMeter | None = vars(optimizer).get(_ATTRIBUTE)
    if found is None:
        found = meter = StepMeter()

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            meter.step()

        optimizer.register_step_post_hook(stepped)
        vars(optimizer)[_ATTRIBUTE] = found
    return found

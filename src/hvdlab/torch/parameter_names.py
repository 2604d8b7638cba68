"""The names of a torch optimizer's parameters, and of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlab.bindings.buckets import check_unique
from hvdlab.collectives.errors import InvalidRequestError


def checked_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, param_groups: Sequence[dict[str, Any]]
) -> dict[torch.Tensor, str]:
    """The names that a user gave to parameters; empty if the user gave none.

    Raises:
        InvalidRequestError: These are no (name, parameter) pairs, a name comes twice, or a parameter of the
            optimizer has no name.
    """
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequestError(
            "named_parameters= takes (name, parameter) pairs; it is usually given model.named_parameters()."
        )
    check_unique([name for name, _ in pairs], "named_parameters=")
    names = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"param_groups[{g}]['params'][{i}] {list(parameter.shape)}"
        for g, group in enumerate(param_groups)
        for i, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if unnamed:
        raise InvalidRequestError(
            "named_parameters= must name every parameter of the optimizer; these are missing: "
            f"{', '.join(unnamed)}."
        )
    return names


def parameter_names(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """The given names, and for a parameter of the optimizer without one its place there, such as ``group0.param3``."""
    places = {
        parameter: f"group{g}.param{i}"
        for g, group in enumerate(param_groups)
        for i, parameter in enumerate(group["params"])
    }
    return {**places, **names}


def gradient_names(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """The name in the core of each parameter's gradient: ``grad.`` and the parameter's name or place."""
    every = parameter_names(param_groups, names)
    return {parameter: f"grad.{every[parameter]}" for group in param_groups for parameter in group["params"]}

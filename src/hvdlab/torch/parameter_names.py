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
    """The names a user gave to parameters; empty if none were given.

    Raises:
        InvalidRequestError: They are no (name, parameter) pairs, a name comes twice, or a parameter of the
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
    """The names given, and for a parameter of the optimizer that got none its place in there."""
    places = {
        parameter: f"group{g}.param{i}"
        for g, group in enumerate(param_groups)
        for i, parameter in enumerate(group["params"])
    }
    return {**places, **names}


def gradient_names(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """The tensor name of every parameter's gradient: by its own name, else by its place in the optimizer."""
    every = parameter_names(param_groups, names)
    return {parameter: f"grad.{every[parameter]}" for group in param_groups for parameter in group["params"]}

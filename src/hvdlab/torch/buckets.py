"""Names of parameters, and which of their gradients are reduced together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from hvdlab.collectives.errors import InvalidRequestError

Groups = int | Sequence[Sequence[torch.Tensor]]
"""Number of groups to form (0: none), or the groups themselves."""

Bucket = tuple[str, list[torch.Tensor]]
"""Tensor name in the core, and the parameters."""


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
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise InvalidRequestError(
            f"Parameter names in named_parameters= must be unique; these are not: {', '.join(twice)}."
        )
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


def bucketed(
    parameters: Sequence[torch.Tensor], names: dict[torch.Tensor, str], groups: Groups
) -> list[Bucket]:
    """Divide parameters into buckets.

    Args:
        parameters: In the optimizer's order, which is the same on all ranks.
        names: The tensor name of each one's gradient.
        groups: A number of groups of about equal length, or lists of parameters; a parameter in no list gets a
            bucket of its own.

    Raises:
        InvalidRequestError: A parameter is in two lists, or a list has something else in it.
    """
    together = _even(parameters, groups) if isinstance(groups, int) else _listed(groups)
    _check_disjoint(together)
    chosen = set(parameters)
    together = [kept for group in together if (kept := [p for p in group if p in chosen])]
    grouped = {parameter for group in together for parameter in group}
    together += [[parameter] for parameter in parameters if parameter not in grouped]
    return [
        (names[group[0]] if len(group) == 1 else f"{names[group[0]]}+{len(group) - 1}", group)
        for group in together
    ]


def _even(parameters: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """``count`` runs of neighbours whose lengths differ by at most one."""
    if count < 0:
        raise InvalidRequestError(f"groups= takes a number of groups, not {count}.")
    count = min(count, len(parameters))
    bounds = [len(parameters) * i // count for i in range(count + 1)] if count else [0]
    return [list(parameters[a:b]) for a, b in pairwise(bounds)]


def _listed(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidRequestError("groups= takes a number, or a list of lists of parameters.")
    return [list(group) for group in groups if group]


def _check_disjoint(groups: list[list[torch.Tensor]]) -> None:
    members = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in members):
        raise InvalidRequestError("groups= takes a number, or a list of lists of parameters.")
    if len(set(members)) != len(members):
        raise InvalidRequestError("A parameter is in groups= more than once.")

"""Which parameters' gradients are reduced together, and under which names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from hvdlab.bindings.hooks import P
from hvdlab.collectives.errors import InvalidRequestError

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
        is_parameter: Whether an object is a parameter; a group may hold nothing else.

    Returns:
        Of each bucket the name, which is that of its first gradient with the number of the others, and the parameters.

    Raises:
        InvalidRequestError: A parameter is in the lists more than once, a list has something else in it, or ``groups`` is
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
    """``count`` runs of neighbours whose lengths differ by at most one."""
    if count < 0:
        raise InvalidRequestError(f"groups= takes a number of groups, not {count}.")
    count = min(count, len(parameters))
    bounds = [len(parameters) * i // count for i in range(count + 1)] if count else [0]
    return [list(parameters[a:b]) for a, b in pairwise(bounds)]


def _listed(groups: Sequence[Sequence[P]]) -> list[list[P]]:
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidRequestError("groups= takes a number, or a list of lists of parameters.")
    return [list(group) for group in groups if group]

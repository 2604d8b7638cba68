"""Keys and values as users give them, checked and grouped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.arrays import adopted, is_array

Key = int | str

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def pairs(keys: Any, values: Any) -> list[tuple[Key, Any]]:
    """One pair for each array: a list for one key gives as many pairs. Row-sparse arrays of frameworks come as :class:`RowSparse`.

    Args:
        keys: An int, a str, or a list or tuple of these, all of one kind.
        values: For one key an array or a list of arrays; for a list of keys a list with one of these for each.

    Raises:
        AssertionError: A key is neither int nor str, kinds are mixed, counts differ, or a value is no array.
        TypeError: A value is neither an array nor a list.
        ValueError: An int key has more than 32 bits.
    """
    if isinstance(keys, list | tuple):
        require(not is_array(values) and len(keys) == len(values), f"{len(keys)} keys need as many values")
        found = [pair for key, value in zip(keys, values, strict=True) for pair in pairs(key, value)]
        require(len({type(key) for key, _ in found}) <= 1, "inconsistent types of keys detected.")
        return found
    require(isinstance(keys, int | str), f"unexpected type for keys: {type(keys)}")
    key: Key = str(keys) if isinstance(keys, str) else int(keys)
    if isinstance(key, int) and not INT_MIN <= key <= INT_MAX:
        raise ValueError(f"key {key} does not fit into 32 bits")
    if type(values) is np.ndarray:
        return [(key, values)]
    if is_array(values):
        return [(key, adopted(values))]
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(
            f"the value of key {key!r} is a {type(values).__name__}, not an array or a list of arrays"
        )
    arrays = list(values)
    for value in arrays:
        require(is_array(value), f"a value of key {key!r} is a {type(value).__name__}, not an array")
    return [(key, adopted(value)) for value in arrays]


def require(condition: bool, text: str) -> None:
    """Raise ``AssertionError``, as MXNet does for arguments, unless the condition holds."""
    if not condition:
        raise AssertionError(text)


def grouped(found: list[tuple[Key, Any]], numbers: Mapping[Key, int]) -> dict[Key, list[Any]]:
    """The values of each key, in the order given; keys in MXNet's order: numbers by size, names in order of init."""
    if len(found) == 1:
        return {found[0][0]: [found[0][1]]}
    groups: dict[Key, list[Any]] = {}
    for key, value in found:
        groups.setdefault(key, []).append(value)
    unknown = len(numbers)
    order = sorted(groups, key=lambda key: key if isinstance(key, int) else numbers.get(key, unknown))
    return {key: groups[key] for key in order}


def unknown_key(key: Key) -> KVStoreError:
    """The error for a key that was never initialised."""
    text = (
        f"key {key} doesn't exist. Did you init?"
        if isinstance(key, str)
        else f"key {key} has not been inited"
    )
    return KVStoreError(text, key)

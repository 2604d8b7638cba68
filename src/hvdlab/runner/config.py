"""Configuration files: Horovod's YAML, with a section per group and a key per flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.runner.flags import FLAGS, LEVELS, Flag, Kind

_BY_KEY = {flag.config: flag for flag in FLAGS if flag.config}


def read_config(path: Path) -> dict[str, Any]:
    """The values of a file by dest.

    Raises:
        InvalidRequestError: The file can't be read, or says something that there is not.
        UnsupportedError: PyYAML is not installed.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidRequestError(f"the configuration file {path} can't be read: {error.strerror}") from error
    return values(_load(text, path), str(path))


def _load(text: str, path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]  # has no types
    except ImportError as error:
        raise UnsupportedError("--config-file needs PyYAML: pip install 'hvdlab[yaml]'.") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path} is no YAML: {error}") from error


def values(tree: Any, source: str) -> dict[str, Any]:
    """The values of a loaded file by dest. ``-`` and ``_`` are the same in its keys.

    Raises:
        InvalidRequestError: A key is unknown, or a value is not of its kind.
    """
    found: dict[str, Any] = {}
    for key, value in _leaves({} if tree is None else tree, source):
        flag = _BY_KEY.get(key)
        if flag is None:
            near = difflib.get_close_matches(key, _BY_KEY, 1)
            raise InvalidRequestError(f"{source}: there is no {key}" + (f"; {near[0]}?" if near else "."))
        if value is not None:
            found[flag.dest] = _checked(flag, value, f"{source}: {key}")
    return found


def _leaves(tree: Any, source: str, above: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise InvalidRequestError(f"{source}: {above or 'the file'} must be a mapping.")
    for key, value in tree.items():
        name = f"{above}.{key}" if above else str(key)
        name = name.replace("_", "-")
        if isinstance(value, dict) or any(other.startswith(f"{name}.") for other in _BY_KEY):
            yield from _leaves({} if value is None else value, source, name)
        else:
            yield name, value


def _checked(flag: Flag, value: Any, where: str) -> Any:
    match flag.kind:
        case Kind.SWITCH:
            good = isinstance(value, bool)
        case Kind.NUMBER:
            good = isinstance(value, int) and not isinstance(value, bool)
        case Kind.REAL:
            good = isinstance(value, int | float) and not isinstance(value, bool)
        case Kind.LEVEL:
            value = str(value).upper()
            good = value in LEVELS
        case Kind.TWO:
            good = isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value)
        case Kind.TEXTS:
            value = value if isinstance(value, list) else [value]
            good = not any(isinstance(part, list | dict) for part in value)
            value = [str(part) for part in value]
        case Kind.TEXT:
            value, good = str(value), not isinstance(value, list | dict)
    if not good:
        expected = "yes or no" if flag.kind is Kind.SWITCH else flag.kind.value
        raise InvalidRequestError(f"{where} is {value!r}; {expected} was expected.")
    return value

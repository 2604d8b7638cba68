"""Ranks to start for a notebook, from the kernel's environment and the notebook's own metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError

LARGEST_NOTEBOOK = 256 << 20
"""Bytes of a notebook that are read for its metadata."""


@dataclass(frozen=True, slots=True)
class PoolDefaults:
    """Defaults of a pool, which the user's options override; None leaves it to the pool."""

    np: int | None = None
    launcher: str | None = None
    plane: str | None = None
    hosts: str | None = None


def from_environment(environ: Mapping[str, str]) -> PoolDefaults:
    """Return the defaults in ``HVDLAB_NP``, ``HVDLAB_LAUNCHER`` and ``HVDLAB_HOSTS``, as a kernelspec sets them.

    Raises:
        InvalidRequestError: ``HVDLAB_NP`` is no number of ranks.
    """
    np = environ.get("HVDLAB_NP")
    return PoolDefaults(
        _count(np, "HVDLAB_NP") if np else None,
        environ.get("HVDLAB_LAUNCHER") or None,
        None,
        environ.get("HVDLAB_HOSTS") or None,
    )


def with_metadata(defaults: PoolDefaults, metadata: Any) -> PoolDefaults:
    """Return the defaults, overridden by the ``hvdlab`` entry of metadata.

    Raises:
        InvalidRequestError: The entry has a value of the wrong type, or no number of ranks.
    """
    found = metadata.get("hvdlab") if isinstance(metadata, dict) else None
    if not isinstance(found, dict):
        return defaults
    texts = {name: found.get(name) for name in ("launcher", "plane", "hosts")}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(
                f"the notebook's metadata `hvdlab.{name}` is to be a text, not {value!r}"
            )
    np = found.get("np")
    return PoolDefaults(
        _count(np, "the notebook's metadata `hvdlab.np`") if np is not None else defaults.np,
        texts["launcher"] or defaults.launcher,
        texts["plane"] or defaults.plane,
        texts["hosts"] or defaults.hosts,
    )


def notebook_metadata(environ: Mapping[str, str], directory: Path) -> dict[str, Any]:
    """Return the metadata of the notebook that this kernel was started for; empty if that is not known.

    Jupyter's server names it in ``JPY_SESSION_NAME``: its path, or its path below the server's root, of which the kernel
    knows only the last part for sure.
    """
    name = environ.get("JPY_SESSION_NAME", "")
    if not name.endswith(".ipynb"):
        return {}
    for path in (Path(name), directory / name, directory / Path(name).name):
        try:
            if path.stat().st_size > LARGEST_NOTEBOOK:
                return {}
            metadata = json.loads(path.read_text(encoding="utf-8")).get("metadata", {})
        except (OSError, ValueError, AttributeError):  # not there, or not a notebook
            continue
        return metadata if isinstance(metadata, dict) else {}
    return {}


def defaults_for_notebook(
    environ: Mapping[str, str] | None = None, directory: Path | None = None
) -> PoolDefaults:
    """Return the defaults of the pool for this kernel's notebook.

    Raises:
        InvalidRequestError: The environment or the metadata has a value that is not valid.
    """
    environ = os.environ if environ is None else environ
    return with_metadata(from_environment(environ), notebook_metadata(environ, directory or Path.cwd()))


def np_of_request(metadata: Any) -> int | None:
    """Return the number of ranks that a client asks for in the metadata of one cell's request; None without such an entry."""
    return with_metadata(PoolDefaults(), metadata).np


def _count(value: Any, what: str) -> int:
    try:
        # int() would turn True into 1 and 2.5 into 2: both are mistakes in the notebook's metadata.
        number = int(value) if not isinstance(value, (bool, float)) else 0
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise InvalidRequestError(f"{what} is to be a number of ranks from 1, not {value!r}")
    return number

"""Lightning has two packages with classes of their own, ``lightning.pytorch`` and ``pytorch_lightning``: to which of them a module belongs."""

from __future__ import annotations

import importlib
from typing import Any

from hvdlab.collectives.errors import StartError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package_of(model: Any) -> str | None:
    """The package whose ``LightningModule`` a module is; ``None`` for a module of torch alone."""
    for kind in type(model).__mro__:
        for name in _PACKAGES:
            if kind.__name__ == "LightningModule" and kind.__module__.startswith(f"{name}."):
                return name
    return None


def lightning(name: str | None) -> Any:
    """The package of this name, or whichever is installed."""
    found: ImportError | None = None
    for each in [name] if name else _PACKAGES:
        try:
            return importlib.import_module(each)
        except ImportError as error:
            found = error
    raise StartError(f"The estimator needs Lightning ({found}): pip install lightning") from found

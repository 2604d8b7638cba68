"""Stand-in for Horovod: ``import horovod`` gives modules of hvdlab.

The modules of this package have Horovod's names; :mod:`hvdlab.horovod.import_hook` lists the modules of hvdlab that stand for
the others. Nothing here is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdlab import _version
from hvdlab.horovod.import_hook import environment, install_as_horovod, offer, target, uninstall

if TYPE_CHECKING:
    from hvdlab.horovod.runner import run as run

__version__ = f"0.28.1+hvdlab.{_version.__version__}"
"""The version of Horovod whose API this is, which scripts compare with, and behind it hvdlab's own."""

__all__ = ["__version__", "environment", "install_as_horovod", "offer", "run", "uninstall"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from hvdlab.horovod.runner import run

        return run
    if name in ("common", "data", "runner", "torch"):  # there in Horovod as soon as one of them was imported
        return import_module(target(f"horovod.{name}"))
    raise AttributeError(f"module 'horovod' (that is, hvdlab) has no attribute {name!r}")
